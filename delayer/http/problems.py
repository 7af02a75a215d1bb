"""Errors for programs, as RFC 9457 says: `application/problem+json`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final, NotRequired

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from typing_extensions import TypedDict

from delayer.config.errors import format_found
from delayer.fields.shapes import SentLineJson, documented

MEDIA_TYPE: Final = "application/problem+json"
RETRY_SECONDS: Final = "5"
_NEXT: Final[Mapping[int, str]] = {
    403: "send it from this daemon's page, or from a program",
    421: "send a loopback name as Host, or give [http] listen another address",
    500: "report it, with what the daemon logged",
    503: "send the request again after Retry-After seconds",
}
"""The next step, by status."""
CORRECT: Final = "correct what `errors` names, and send the request again; /api/openapi.json describes each field"
CORRECT_FORM: Final = "correct what `errors` names, and send the form again"
DOCUMENT: Final = "/api/openapi.json has every path with its methods, fields and errors"
ACTIONS: Final = "POST a form to /actions/messages, /actions/refused, /actions/strays or /actions/schedules"
_UNKNOWN: Final = "unknown field "
_REFUSED: Final = "the daemon would refuse it: "


@documented
class WrongField(TypedDict):
    """One mistake of a request."""

    where: str
    """The field, the parameter or the header; with JSON lines also the line."""
    expected: str
    found: NotRequired[str]
    """May be missing only if nothing was given."""


def wrong_field(where: str, text: str) -> WrongField:
    """Make a mistake of a text such as ``expected a number, found "x"``."""
    expected, *found = re.split(r"[,;] found:? ", text.removeprefix("expected "), maxsplit=1)
    wrong: WrongField = {"where": where, "expected": expected}
    return {**wrong, "found": found[0]} if found else wrong


def unknown_field(name: str, known: Collection[str]) -> WrongField:
    near = difflib.get_close_matches(name, known, 1)
    hint = f"; did you mean {format_found(near[0])}?" if near else ""
    expected = f"one of {', '.join(known)}" if known else "no fields"
    return {"where": name[:80], "expected": expected, "found": f"{_UNKNOWN}{format_found(name)}{hint}"}


def refused_field(where: str, reason: str) -> WrongField:
    """Make a mistake of the reason for which the daemon would refuse a message."""
    return {"where": where, "expected": "what the daemon takes", "found": f"{_REFUSED}{reason}"}


def in_words(wrong: Sequence[WrongField]) -> str:
    """The first mistake, and how many more there are."""
    more = f"; and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    where, found = wrong[0]["where"], wrong[0].get("found", "nothing")
    if found.startswith(_UNKNOWN):
        line = where.rpartition(" ")[0]
        text = f"{line}: {found}" if line else found
        return f"{text}{'' if text.endswith('?') else '.'} Expected {wrong[0]['expected']}{more}"
    if found.startswith(_REFUSED):
        return f"{where}: {found}{more}"
    return f"{where}: expected {wrong[0]['expected']}, found {found}{more}"


@documented
class ProblemShape(TypedDict):
    """Why a request failed (RFC 9457)."""

    type: str
    """Always about:blank: the status says what kind of problem it is."""
    title: str
    """The name of the status."""
    status: int
    detail: str
    """What is wrong, and with what."""
    next: str
    """The next step."""
    errors: NotRequired[list[WrongField]]
    """Every mistake of the request."""
    results: NotRequired[list[SentLineJson]]
    """Of JSON lines that the broker took in part: the result of each line."""


class HttpProblem(HTTPException):
    """A request that fails with this status."""

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        next_step: str = "",
        errors: Sequence[WrongField] = (),
        headers: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(status, detail, dict(headers or {}))
        found = {"next": next_step or (CORRECT if errors else ""), "errors": list(errors), **more}
        self.more = {name: value for name, value in found.items() if value}


def by_program(request: Request) -> bool:
    """Whether a program sent the request, for JSON or for a change with a token in a header. Programs get JSON, without
    a confirmation step."""
    path, headers = request.url.path, request.headers
    changes = path.startswith("/actions/")
    told = "authorization" in headers or "application/json" in headers.get("accept", "")
    return path.startswith("/api/") or path == "/api" or (changes and told)


def problem_response(request: Request, error: HTTPException) -> Response:
    headers, status, path = dict(error.headers or {}), error.status_code, request.url.path
    detail, step = error.detail, _NEXT.get(status, DOCUMENT if path.startswith("/api") else ACTIONS)
    if status == 503:
        headers.setdefault("Retry-After", RETRY_SECONDS)
    if not isinstance(error, HttpProblem) and status == 405:
        allowed = ", ".join(sorted(headers["Allow"].split(", ")))
        detail = f"{path[:200]}: expected the method {allowed}, found {request.method}."
        if path.startswith("/api/messages/") and request.method in ("PATCH", "DELETE"):
            step = "use PATCH or DELETE /api/messages?message_id=ID, or ?key=KEY"
    elif detail == HTTPStatus(404).phrase:
        detail = f"{path[:200]}: expected a path of the API, found none there."
    content = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "next": step,
        **getattr(error, "more", {}),
    }
    return JSONResponse(content, status, headers, MEDIA_TYPE)
