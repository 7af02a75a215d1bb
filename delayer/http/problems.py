"""Errors for programs, as RFC 9457 says: `application/problem+json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final, NotRequired

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from typing_extensions import TypedDict

from delayer.http.shapes import SentLineJson, documented

MEDIA_TYPE: Final = "application/problem+json"
RETRY_SECONDS: Final = "5"


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
    next: NotRequired[str]
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
        found = {"next": next_step, "errors": list(errors), **more}
        self.more = {name: value for name, value in found.items() if value}


def by_program(request: Request) -> bool:
    """Whether a program sent the request, for JSON or for a change with a token in a header. Programs get JSON, without
    a confirmation step."""
    path, headers = request.url.path, request.headers
    changes = path.startswith("/actions/")
    told = "authorization" in headers or "application/json" in headers.get("accept", "")
    return path.startswith("/api/") or path == "/api" or (changes and told)


def problem_response(error: HTTPException) -> Response:
    headers = dict(error.headers or {})
    if error.status_code in (429, 503):
        headers.setdefault("Retry-After", RETRY_SECONDS)
    content = {
        "type": "about:blank",
        "title": HTTPStatus(error.status_code).phrase,
        "status": error.status_code,
        "detail": error.detail,
        **getattr(error, "more", {}),
    }
    return JSONResponse(content, error.status_code, headers, MEDIA_TYPE)
