"""Endpoints of the API. The declaration of an endpoint is its route, its validation, and its part of the OpenAPI
document."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from delayer.config.errors import format_found
from delayer.config.tokens import Role
from delayer.http import forms
from delayer.http.access import Client
from delayer.http.pages import Pages
from delayer.http.problems import HttpProblem, WrongField, in_words, unknown_field, wrong_field

JSON: Final = "application/json"
LINES: Final = "application/x-ndjson"
PATCHES: Final = (JSON, "application/merge-patch+json")
MOST_NAMES: Final = 100
"""Names in an object of fields: more than any model has. Also the maximum number of a message's headers."""
TABLES: Final = ("headers", "properties")
"""Fields that are such objects too."""
MOST_MARKS: Final = 20_000
"""The characters ``[``, ``{``, ``,`` and ``:`` of an object, outside its strings. Each may begin a value, which blocks
the event loop for up to four microseconds."""
MOST_BODIES: Final = 8
"""Bodies of more than SMALL bytes that are in memory at once."""
OF_ONE: Final = MOST_BODIES // 2
"""Maximum number of these bodies for one token, so that a client with slow bodies does not block the rest."""
SMALL: Final = 64 * 1024
ALWAYS: Final = (400, 401, 403, 406, 411, 413, 421, 500, 503)
"""Problems that every endpoint may answer."""
OF_BODIES: Final = (408, 415, 422)


_OF_PYDANTIC: Final = re.compile(r"^(Input|String) should (be|have) |(?<=a )valid |, unable to .*$")
"""What pydantic says around the expected value."""


class Clash(ValueError):
    """Fields that do not go together. Raised by the model's validators."""

    def __init__(self, wrong: Sequence[WrongField]) -> None:
        super().__init__(in_words(wrong))
        self.wrong = wrong


class Fields(BaseModel):
    """The fields of a query or of a body. An unknown one is a mistake."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _has_few_names(cls, given: Any) -> Any:
        """An error for each of half a million unknown names would take seconds, and half a gigabyte."""
        tables = {"": given, **{name: given.get(name) for name in TABLES}} if isinstance(given, dict) else {}
        for where, names in tables.items():
            if isinstance(names, dict) and len(names) > MOST_NAMES:
                raise Clash([{"where": where, "expected": f"at most {MOST_NAMES} names", "found": f"{len(names)}"}])
        return given


class NoFields(Fields):
    """No fields."""


@dataclass(frozen=True, slots=True)
class Call:
    """A request that passed all checks. ``query`` and ``body``: as the endpoint declares them; of JSON lines, the
    lines."""

    request: Request
    client: Client | None
    query: Any
    body: Any = None

    @property
    def who(self) -> str:
        assert self.client is not None
        return self.client.who

    @property
    def name(self) -> str:
        found: str = self.request.path_params["name"]
        return found


EndpointHandler = Callable[[Call], Awaitable[Any]]
"""Returns the answer, of the shape that the endpoint declares, or a response. Raises HttpProblem."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method of one path. ``role``: of the token that it needs; None: as the page. ``result``: the shape of the
    answer. ``lines``: whether the body may be JSON lines. ``problems``: statuses of its errors."""

    method: str
    path: str
    handler: EndpointHandler
    result: Any
    role: Role | None = Role.READ
    query: type[Fields] = NoFields
    body: type[Fields] | None = None
    lines: bool = False
    status: int = 200
    problems: Sequence[int] = ()
    headers: Sequence[tuple[str, str]] = ()  # names and descriptions, of the request

    @property
    def all_problems(self) -> list[int]:
        return sorted({*ALWAYS, *(OF_BODIES if self.body else ()), *self.problems})

    @property
    def media_types(self) -> tuple[str, ...]:
        return PATCHES if self.method == "PATCH" else (JSON, LINES) if self.lines else (JSON,)


class Api:
    """Answers the requests to these endpoints. ``turns``: how many run at once."""

    def __init__(self, endpoints: Sequence[Endpoint], pages: Pages) -> None:
        self._pages = pages
        self._large = asyncio.Semaphore(MOST_BODIES)
        self._large_of = defaultdict[str, asyncio.Semaphore](partial(asyncio.Semaphore, OF_ONE))  # by the token's name
        by_path = groupby(sorted(endpoints, key=attrgetter("path")), attrgetter("path"))
        # Starlette's own choice among methods would name only those of the first route in Allow.
        self.paths = {path: {one.method: one for one in group} for path, group in by_path}

    @property
    def routes(self) -> list[Route]:
        return [
            Route(path, partial(self._answer, methods), methods=[*methods])
            # A path with a parameter must not hide one without.
            for path, methods in sorted(self.paths.items(), key=lambda one: "{" in one[0])
        ]

    async def _answer(self, methods: Mapping[str, Endpoint], request: Request) -> Response:
        endpoint = methods["GET" if request.method == "HEAD" else request.method]
        if not accepts_json(request.headers.get("accept", "")):
            raise HttpProblem(406, f"Accept: expected {JSON} among the types, found others.")
        sessions = self._pages.sessions
        client = sessions.client(request)
        if endpoint.role is None and not self._pages.readable(request):
            raise sessions.locked(request, Role.READ, "Reading needs a token, unless [http] open is set.")
        if endpoint.role is not None and not (client and client.role.allows(endpoint.role)):
            raise sessions.locked(request, endpoint.role, f"{endpoint.method} {endpoint.path} needs a token.")
        query = _query(endpoint.query, request)
        if endpoint.body is None:
            return self._respond(endpoint, await endpoint.handler(Call(request, client, query)))
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in endpoint.media_types:
            found = repr(kind[:80]) if kind else "none"
            raise HttpProblem(
                415,
                f"Content-Type: expected {' or '.join(endpoint.media_types)}, found {found}.",
                next_step=f"send the header Content-Type: {JSON}",
            )
        if int(request.headers.get("content-length", "0")) <= SMALL:
            return await self._with_body(endpoint, kind, Call(request, client, query))
        async with AsyncExitStack() as turns:
            try:
                async with asyncio.timeout(forms.BODY_SECONDS):
                    await turns.enter_async_context(self._large_of[client.token if client else ""])
                    await turns.enter_async_context(self._large)
            except TimeoutError:
                busy = f"Other large bodies have been coming in for {forms.BODY_SECONDS:g} s."
                raise HttpProblem(503, busy, headers={"Connection": "close"}) from None
            return await self._with_body(endpoint, kind, Call(request, client, query))

    async def _with_body(self, endpoint: Endpoint, kind: str, call: Call) -> Response:
        text = await forms.read_body(call.request)
        assert endpoint.body is not None
        body = text if kind == LINES else read_json(endpoint.body, text)
        call = Call(call.request, call.client, call.query, body)
        # A change continues even if its client closes the connection.
        return self._respond(endpoint, await asyncio.shield(endpoint.handler(call)))

    @staticmethod
    def _respond(endpoint: Endpoint, result: Any) -> Response:
        if isinstance(result, Response):
            return result
        return JSONResponse(result, endpoint.status)


def accepts_json(accept: str) -> bool:
    """
    >>> [accepts_json(one) for one in ("", "text/html, */*;q=0.1", "text/html", "application/json;q=0")]
    [True, True, False, False]
    """
    for one in accept.split(","):
        kind, *parameters = (part.strip().lower() for part in one.split(";"))
        if kind in ("", "*/*", "application/*", JSON) and not {"q=0", "q=0.0", "q=0.00", "q=0.000"} & {*parameters}:
            return True
    return False


def _query(model: type[Fields], request: Request) -> Any:
    """Read the query. Raises HttpProblem."""
    forms.reject_duplicates([name for name, _ in request.query_params.multi_items()])
    try:
        return model.model_validate(dict(request.query_params))
    except ValidationError as error:
        wrong = mistakes(error.errors(include_url=False), model)
        raise HttpProblem(400, f"Query: {in_words(wrong)}.", errors=wrong) from None


def _check_marks(text: bytes, most: int, where: str = "") -> None:
    """Refuse JSON of too many values before it is parsed. Raises HttpProblem."""
    if has_few_marks(text, most):
        return
    wrong: WrongField = {
        "where": where or "the whole body",
        "expected": f"at most {most} of the characters [ {{ , : outside strings",
        "found": "more",
    }
    step = "send large JSON as text in `body`, or in `body_b64`, with a content_type"
    raise HttpProblem(422, f"Body: {in_words([wrong])}.", errors=[wrong], next_step=step)


def has_few_marks(text: bytes, most: int) -> bool:
    r"""Whether at most ``most`` characters of this JSON may begin a value. Those in strings do not count.

    >>> text = rb'{"a": "[[,\\", "b": "\",,,"}'
    >>> has_few_marks(text, 4), has_few_marks(text, 3)
    (True, False)
    """
    if _marks(text) <= most:
        return True
    bare = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    # Each string but the first comes after such a character.
    return bare.count(b'"') <= 2 * (most + 1) and _marks(b"".join(bare.split(b'"')[::2])) <= most


def _marks(text: bytes) -> int:
    return sum(map(text.count, (b"[", b"{", b",", b":")))


def read_json(model: type[Fields], text: bytes, where: str = "") -> Any:
    """Read an object of JSON. ``where``: its line. Raises HttpProblem: 400 if it is not JSON, else 422."""
    _check_marks(text, MOST_MARKS, where)
    try:
        return model.model_validate_json(text or b" ")
    except ValidationError as error:
        found = error.errors(include_url=False)
        wrong = mistakes(found, model, where)
        status = 400 if found[0]["type"] == "json_invalid" else 422
        raise HttpProblem(status, f"Body: {in_words(wrong)}.", errors=wrong) from None


def mistakes(found: Sequence[ErrorDetails], model: type[BaseModel], where: str = "") -> list[WrongField]:
    """List the mistakes, at most 20."""
    wrong = [one for each in found[:20] for one in _mistakes_of(each, model, where)]
    return [{**one, "where": " ".join(filter(None, (where, one["where"]))) or "the whole body"} for one in wrong]


def _mistakes_of(one: ErrorDetails, model: type[BaseModel], where: str) -> Sequence[WrongField]:
    place = ".".join(str(part)[:80] for part in one["loc"])
    cause = one.get("ctx", {}).get("error")
    if isinstance(cause, Clash):
        return cause.wrong
    if one["type"] == "extra_forbidden":
        return [unknown_field(place, model.model_fields)]
    if one["type"] == "json_invalid":
        why, _, at = str(cause).partition(" at line ")
        if where:  # Of JSON lines, each is a text of one line.
            at = at.partition(" ")[2]
        place_of = f" at {at}" if where and at else f" at line {at}" if at else ""
        return [{"where": place, "expected": "JSON", "found": f"a mistake{place_of}: {why}"}]
    if one["type"] == "missing":
        return [{"where": place, "expected": "a value"}]
    text = _OF_PYDANTIC.sub("", one["msg"]).replace("a integer", "a whole number")
    wrong = wrong_field(place, str(cause) if isinstance(cause, ValueError) else text)
    given = "an object" if isinstance(one["input"], dict) else format_found(one["input"])
    return [{"where": place, "expected": wrong["expected"], "found": wrong.get("found", given)}]
