"""Access control: hosts, origins, request sizes, and tokens.

Every client that reaches a loopback address, the default, may read the page. A web page must not read through a
browser, so the daemon does not answer to a foreign name that points at 127.0.0.1. Everything else needs a token of the
right role. It comes in the header ``Authorization: Bearer``, or through a session that it opened (a cookie that scripts
cannot read and other sites cannot send). It is never part of a URL.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Final, NamedTuple
from unicodedata import category
from urllib.parse import urlsplit

import structlog
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp

from delayer.config.texts import is_loopback
from delayer.config.tokens import NamedToken, Role, TokenFile, digest_of, parse_tokens
from delayer.http.problems import HttpProblem, by_program, problem_response

log = structlog.get_logger(__name__)

WHO: Final = "x-delayer-who"
"""The header in which a program names its operator. On the page, the operator enters a name with the token."""
COOKIE: Final = "delayer_session"
PROBES: Final = ("/health/live", "/health/ready")
"""Paths that answer every client: health checks send any ``Host``, or none, and read no more than the status."""
MAX_BODY: Final = 256 * 1024
SCHEMES: Final = ("Basic", "Digest", "Negotiate", "Ntlm")
"""Other schemes of Authorization, which an error names."""
AT_ONCE: Final = 128
"""Maximum number of requests at once, without probes. The server answers 503 to more."""
LASTS: Final = 3600.0
"""Seconds until an unused session expires."""
LONGEST: Final = 12 * 3600.0
"""Seconds until any session expires. Browsers send a cookie to all ports of a host, so other programs may see it."""
LONGEST_NAME: Final = 100
"""Maximum characters of a session's name in a request. Its own names have 43."""
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
    return not origin or (origin != "null" and origin.partition("://")[2] == host)


def cookie_name(host: str) -> str:
    """Name the cookie for this ``Host``. Daemons at two ports of one host have a cookie each. Pure."""
    try:
        port = urlsplit(f"//{host}").port
    except ValueError:
        port = None
    return COOKIE if port is None else f"{COOKIE}_{port}"


def cookie_of(request: Request) -> str:
    """Name the cookie for this request, which has no ``Host`` if it is of HTTP/1.0."""
    return cookie_name(request.headers.get("host", ""))


class Client(NamedTuple):
    """A client with a token. ``who``: for the audit log. ``token``: the token's name."""

    who: str
    role: Role
    token: str


def name_of(said: str) -> str:
    """The name that a client gives itself, for a log and a table. Without invisible characters, and without brackets,
    so that it cannot imitate the token and the address that follow it."""
    shown = (one for one in said if one.isprintable() and category(one) not in ("Ps", "Pe"))
    return "".join(shown).strip()[:80]


def _program(request: Request, token: NamedToken) -> Client:
    """Describe a program: the name it gives, its token, and its address."""
    host = "" if request.client is None else f", {request.client.host}"
    said = name_of(request.headers.get(WHO, ""))
    return Client(f"{said or 'a program'} (token {token.name}, http{host})", token.role, token.name)


class Tokens:
    """The tokens that the file at ``path()`` contains now. An unreadable file has none, because its purpose may be
    to revoke them. Each new mistake is logged."""

    def __init__(self, path: Callable[[], str | None]) -> None:
        self._path = path
        self._seen: object = None
        self._file = TokenFile()

    @property
    def file(self) -> str | None:
        """The configured file."""
        return self._path()

    def __call__(self) -> Sequence[NamedToken]:
        path = self.file
        if path is None:
            return ()
        try:
            there = Path(path).stat()
            seen: object = (path, there.st_mtime_ns, there.st_size, there.st_ino, there.st_ctime_ns)
            if seen == self._seen:
                return self._file.tokens
            self._file = parse_tokens(Path(path).read_text("utf-8"))
            wrong = [f"line {number}: expected {expected}" for number, expected in self._file.mistakes]
        except (OSError, UnicodeDecodeError) as error:
            seen = reason = (error.strerror if isinstance(error, OSError) else None) or "expected UTF-8"
            if seen == self._seen:
                return ()
            self._file, wrong = TokenFile(), [reason]
        self._seen = seen
        for reason in wrong:
            log.error("token not used", file=path, reason=reason, next_step="fix the file; it is read again at once")
        return self._file.tokens

    def find(self, said: str) -> NamedToken | None:
        """Find a token. Compares all, so that the time does not tell which was close."""
        digest, found = digest_of(said), None
        for token in self():
            if hmac.compare_digest(digest, token.digest):
                found = token
        return found


Notice = tuple[str, Sequence[str]]
"""The result of a change, for its session's next page: a heading and lines."""


class BrowserSession(NamedTuple):
    """A browser that gave a token, for as long as the file has that token."""

    who: str
    token: NamedToken
    began: float
    last: float
    notice: Notice | None = None


@dataclass(eq=False)
class Sessions:
    """The sessions, and the tokens that open them. A token has at most ``most``: a new one ends its oldest, and never
    that of another token. Sign-ins are not throttled: a token of 16 characters cannot be guessed."""

    tokens: Tokens
    clock: Callable[[], float] = monotonic
    most: int = 100
    _sessions: dict[bytes, BrowserSession] = field(default_factory=dict, init=False)

    @property
    def can_open(self) -> bool:
        return bool(self.tokens())

    def open(self, said: str, who: str, place: str) -> str | None:
        """Open a session with a token that may read. Returns its name; None if the token is wrong. ``who`` says who is
        at the browser at ``place``."""
        token = self.tokens.find(said)
        if token is None or not token.role.allows(Role.READ):
            return None
        name = secrets.token_urlsafe(32)
        self._sessions = {key: one for key, one in self._sessions.items() if not self._is_over(one)}
        of_token = [key for key, one in self._sessions.items() if one.token == token]
        if len(of_token) >= self.most:
            del self._sessions[of_token[0]]
        who = f"{who} (token {token.name}, page, {place})"
        self._sessions[digest_of(name)] = BrowserSession(who, token, self.clock(), self.clock())
        return name

    def close(self, request: Request) -> None:
        self._sessions.pop(_key(request), None)

    def session(self, request: Request) -> BrowserSession | None:
        key = _key(request)
        found = self._sessions.get(key)
        if found is None:
            return None
        if self._is_over(found):
            del self._sessions[key]
            return None
        self._sessions[key] = found._replace(last=self.clock())
        return found

    def _is_over(self, session: BrowserSession) -> bool:
        now = self.clock()
        return now - session.last > LASTS or now - session.began > LONGEST or session.token not in self.tokens()

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

    def client(self, request: Request) -> Client | None:
        """Find the client by its token; None without one."""
        kind, _, said = request.headers.get("authorization", "").partition(" ")
        if kind:
            token = self.tokens.find(said.strip()) if kind.lower() == "bearer" else None
            return None if token is None else _program(request, token)
        session = self.session(request)
        return None if session is None else Client(session.who, session.token.role, session.token.name)

    def locked(self, request: Request, needed: Role, detail: str) -> HttpProblem:
        """The answer to a client whose token, if it has one, does not allow this."""
        client = self.client(request)
        step = f"send `Authorization: Bearer TOKEN` with a token of the role {needed}"
        if client is not None:
            found = f"the token {client.token}, of the role {client.role}"
            return HttpProblem(403, f"{detail} Expected a token of the role {needed}, found {found}.", next_step=step)
        if not self.can_open:
            step = "name a file in [http] tokens_file, with a line NAME ROLE TOKEN for each token"
        scheme = request.headers.get("authorization", "").partition(" ")[0].title()
        found = "none" if not scheme else "one" if self.tokens.file is None else "one that is not in [http] tokens_file"
        if self.tokens.file is None:
            found += "; no [http] tokens_file is configured"
        elif scheme in SCHEMES:
            found = f'Authorization of the scheme "{scheme}"'
        elif scheme not in ("", "Bearer"):  # It may be a token without its scheme, which must not come into a log.
            found = "an Authorization that does not begin with `Bearer` and a space"
        headers = {"WWW-Authenticate": "Bearer"}
        detail = f"{detail} Expected a token of the role {needed}, found {found}."
        return HttpProblem(401, detail, next_step=step, headers=headers)

    def allows(self, request: Request, needed: Role) -> bool:
        client = self.client(request)
        return client is not None and client.role.allows(needed)


def _key(request: Request) -> bytes:
    """Read the header itself, because ``request.cookies`` unquotes the cookies of all programs on this host, in a time
    that grows with the square of their length before Python 3.11.10. No session's name needs quotes."""
    ours, said = cookie_of(request), ""
    for cookie in request.headers.get("cookie", "").split(";"):
        name, _, value = cookie.partition("=")
        if name.strip() == ours:
            said = value.strip()
    return digest_of(said if len(said) <= LONGEST_NAME else "")


class RequestGuard(BaseHTTPMiddleware):
    """The middleware in front of all handlers: checks hosts, origins and sizes, and sets every response's headers."""

    def __init__(self, app: ASGIApp, listen: Callable[[], str], larger: Mapping[str, int] | None = None) -> None:
        """``larger``: the maximum bytes of a body at these paths, if it is more than MAX_BODY."""
        super().__init__(app)
        self._larger = larger or {}
        self._running = 0
        self._listen = listen

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        refusal = self._refusal(request)
        if self._running >= AT_ONCE and request.scope["path"] not in PROBES:
            refusal = HttpProblem(503, f"Expected at most {AT_ONCE} requests at once, found more.")
        if refusal is None:
            self._running += 1
            try:
                answer = await call_next(request)
            finally:
                self._running -= 1
        elif by_program(request):
            answer = problem_response(request, refusal)
        else:
            answer = PlainTextResponse(f"{refusal.detail}\n", refusal.status_code)
        # Browsers cache only styles and scripts, for five minutes.
        kept = answer.status_code == 200 and request.url.path.startswith("/static/")
        answer.headers.update({**HEADERS, "Cache-Control": "public, max-age=300" if kept else "no-store"})
        if "transfer-encoding" in request.headers:
            answer.headers["Connection"] = "close"  # Nobody reads the chunks.
        return answer

    def _refusal(self, request: Request) -> HttpProblem | None:
        if request.scope["path"] in PROBES:
            return None
        given = request.headers
        host = given.get("host", "")
        if not host_is_ours(host, self._listen()):
            return HttpProblem(
                421,
                "This address answers to localhost and to loopback addresses only. A proxy before it sets the Host "
                "header to one of these.",
            )
        if not from_our_page(request.method, given.get("sec-fetch-site", ""), given.get("origin", ""), host):
            return HttpProblem(403, "Not from another site's page.")
        most, length = self._larger.get(request.scope["path"], MAX_BODY), given.get("content-length", "0")
        if "transfer-encoding" in given or not (length.isascii() and length.isdecimal()):
            return HttpProblem(411, f"Expected a Content-Length, of at most {most} bytes.")
        if int(length) > most:
            return HttpProblem(413, f"Expected at most {most} bytes, found {length[:20]}.")
        return None
