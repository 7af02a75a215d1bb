"""Errors for programs, as RFC 9457 says: `application/problem+json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final, NotRequired

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from typing_extensions import TypedDict

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
DOCUMENT: Final = "/api/openapi.json has every path with its methods, fields and errors"


@documented
class WrongField(TypedDict):
    """One mistake of a request."""

    where: str
    """The field, the parameter or the header; with JSON lines also the line."""
    expected: str


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
    detail, step = error.detail, _NEXT.get(status, DOCUMENT if path.startswith("/api") else "read docs/http.md")
    if status == 503:
        headers.setdefault("Retry-After", RETRY_SECONDS)
    if not isinstance(error, HttpProblem) and status == 405:
        allowed = ", ".join(sorted(headers["Allow"].split(", ")))
        detail = f"{path[:200]}: expected the method {allowed}, found {request.method}."
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
