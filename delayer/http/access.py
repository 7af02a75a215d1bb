"""Access control: hosts, origins, request sizes, and the token.

Every client that reaches a loopback address, the default, may read. A web page must not read through a browser, so the
daemon does not answer to a foreign name that points at 127.0.0.1. Changes need the token; away from loopback, reading
does too. It comes in the header ``Authorization: Bearer``, or through a session that it opened (a cookie that scripts
cannot read and other sites cannot send). It is never part of a URL.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp

from delayer.config.texts import is_loopback
from delayer.core.secret import Secret

WHO: Final = "x-delayer-who"
"""The header in which a program names its operator. On the page, the operator enters a name with the token."""
COOKIE: Final = "delayer_session"
PROBES: Final = ("/health/live", "/health/ready")
"""Paths that answer every client: health checks send any ``Host``, or none, and read no more than the status."""
LASTS: Final = 3600.0
"""Seconds until an unused session expires."""
LONGEST: Final = 12 * 3600.0
"""Seconds until any session expires. Browsers send a cookie to all ports of a host, so other programs may see it."""
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # Not "no-referrer", because browsers then send "null" as the origin of our own forms.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


def host_is_ours(host: str, listen: str) -> bool:
    """Whether a request's ``Host`` names this server. On loopback, only loopback names are accepted, because any other
    name may belong to a site that points a browser here. Pure."""
    if not is_loopback(listen.rpartition(":")[0]):
        return True
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    return is_loopback(name)


def from_our_page(method: str, site: str, origin: str, host: str) -> bool:
    """Whether a request does not come from another site's page. Programs send neither header. Pure."""
    if method in ("GET", "HEAD"):
        return True
    if site:
        return site in ("same-origin", "none")
    return not origin or (origin != "null" and urlsplit(origin).netloc == host)


def cookie_name(host: str) -> str:
    """Name the cookie for this ``Host``. Daemons at two ports of one host have a cookie each. Pure."""
    try:
        port = urlsplit(f"//{host}").port
    except ValueError:
        port = None
    return COOKIE if port is None else f"{COOKIE}_{port}"


def _program(request: Request) -> str:
    """Describe a program that makes a change: its address, and the name it gives. All clients share one token, so the
    name is only for the audit log.

    The client controls the header's bytes, which go into a log and a table, so invisible characters are dropped.
    """
    host = "" if request.client is None else f", {request.client.host}"
    said = "".join(one for one in request.headers.get(WHO, "") if one.isprintable()).strip()[:80]
    return f"{said or 'a program'} (http{host})"


Notice = tuple[str, Sequence[str]]
"""The result of a change, for its session's next page: a heading and lines."""


class BrowserSession(NamedTuple):
    """A browser that gave the token. ``token``: its hash."""

    who: str
    token: bytes
    began: float
    last: float
    notice: Notice | None = None


@dataclass(eq=False)
class Sessions:
    """At most ``most`` sessions, and their token. Sign-ins are not throttled: a token of 16 characters cannot be
    guessed."""

    token: Callable[[], Secret | None]
    clock: Callable[[], float] = monotonic
    most: int = 1_000
    _sessions: dict[bytes, BrowserSession] = field(default_factory=dict, init=False)

    @property
    def can_open(self) -> bool:
        return self.token() is not None

    def open(self, said: str, who: str) -> str | None:
        """Open a session with the token. Returns its name; None if the token is wrong."""
        if not self._is_token(said):
            return None
        name = secrets.token_urlsafe(32)
        while len(self._sessions) >= self.most:
            del self._sessions[next(iter(self._sessions))]
        self._sessions[_digest(name)] = BrowserSession(who, self._present(), self.clock(), self.clock())
        return name

    def close(self, request: Request) -> None:
        self._sessions.pop(_key(request), None)

    def session(self, request: Request) -> BrowserSession | None:
        key = _key(request)
        found = self._sessions.get(key)
        if found is None:
            return None
        now = self.clock()
        over = now - found.last > LASTS or now - found.began > LONGEST
        if over or found.token != self._present():
            del self._sessions[key]
            return None
        self._sessions[key] = found._replace(last=now)
        return found

    def leave(self, request: Request, notice: Notice) -> bool:
        """Save a notice for this session's next page. False without a session."""
        found = self.session(request)
        if found is not None:
            self._sessions[_key(request)] = found._replace(notice=notice)
        return found is not None

    def take_notice(self, request: Request) -> Notice | None:
        found = self.session(request)
        if found is None or found.notice is None:
            return None
        self._sessions[_key(request)] = found._replace(notice=None)
        return found.notice

    def who(self, request: Request) -> str | None:
        """Name the client that wants to change something; None without the token."""
        kind, _, said = request.headers.get("authorization", "").partition(" ")
        if kind:
            return _program(request) if kind.lower() == "bearer" and self._is_token(said.strip()) else None
        session = self.session(request)
        return None if session is None else session.who

    def _is_token(self, said: str) -> bool:
        return hmac.compare_digest(_digest(said), self._present())

    def _present(self) -> bytes:
        """Return the token's hash. Without a token it is empty, which equals no hash."""
        token = self.token()
        return b"" if token is None else _digest(token.reveal())


def _key(request: Request) -> bytes:
    return _digest(request.cookies.get(cookie_name(request.headers.get("host", "")), ""))


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


class RequestGuard(BaseHTTPMiddleware):
    """The middleware in front of all handlers: checks hosts, origins and sizes, and sets every response's headers."""

    def __init__(self, app: ASGIApp, listen: Callable[[], str], max_body: int = 256 * 1024) -> None:
        super().__init__(app)
        self._max_body = max_body
        self._listen = listen

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        answer = self._refusal(request) or await call_next(request)
        # Browsers cache only styles and scripts, for five minutes.
        kept = answer.status_code == 200 and request.url.path.startswith("/static/")
        answer.headers.update({**HEADERS, "Cache-Control": "public, max-age=300" if kept else "no-store"})
        return answer

    def _refusal(self, request: Request) -> Response | None:
        if request.scope["path"] in PROBES:
            return None
        given = request.headers
        host = given.get("host", "")
        if not host_is_ours(host, self._listen()):
            return PlainTextResponse(
                "This address answers to localhost and to loopback addresses only. A proxy before it sets the Host "
                "header to one of these.\n",
                status_code=421,
            )
        if not from_our_page(request.method, given.get("sec-fetch-site", ""), given.get("origin", ""), host):
            return PlainTextResponse("Not from another site's page.\n", status_code=403)
        length = given.get("content-length", "0")
        if not length.isdecimal() or int(length) > self._max_body or "transfer-encoding" in given:
            return PlainTextResponse(f"At most {self._max_body} bytes, with a Content-Length.\n", status_code=413)
        return None
