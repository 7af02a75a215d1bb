"""/api/schedules: schedules, and all changes of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final, Literal, TypeVar
from urllib.parse import quote

from pydantic import AfterValidator, ConfigDict, Field, model_validator
from pydantic_core import CoreSchema
from pydantic_core.core_schema import no_info_plain_validator_function
from starlette.responses import JSONResponse, Response

from delayer.config.errors import Expected
from delayer.config.tokens import Role
from delayer.config.values import DURATION
from delayer.core.filters import Token
from delayer.fields import as_json
from delayer.fields.schedules import FIELDS, name_or_none, new_schedule, with_fields
from delayer.fields.shapes import RunJson, ScheduleJson, ScheduleRemovedJson, SchedulesJson, TimesJson
from delayer.http import forms, render
from delayer.http.endpoints import Call, Endpoint, Fields
from delayer.http.pages import Pages
from delayer.http.problems import HttpProblem, wrong_field
from delayer.http.view import ROWS
from delayer.schedule.cron import LONGEST, BadCron
from delayer.schedule.record import ScheduleRecord
from delayer.schedule.schedule import Schedule
from delayer.schedule.wall import UnknownZone
from delayer.store import held_messages
from delayer.store.admin.actions import change_connection
from delayer.store.errors import ScheduleRefused, ScheduleUnknown
from delayer.store.schedules import changes, reading
from delayer.store.session import read_connection

PATH: Final = "/api/schedules"
LISTED: Final = f"GET {PATH} lists them"
NAMED: Final = PATH + "/{name}"
MOST_TIMES: Final = 1_000
T = TypeVar("T")
_TEXT: Final[dict[str, Any]] = {"type": "string"}
_NAME: Final[dict[str, Any]] = {"type": "string", "maxLength": 255}
_DURATION: Final[dict[str, Any]] = {"type": "string", "pattern": f"^{DURATION}$"}
_INSTANT: Final[dict[str, Any]] = {"type": "string", "format": "date-time"}
_LAST: Final[dict[str, Any]] = {"anyOf": [_INSTANT, {"const": "never"}]}
_NEEDS: Final[Any] = [{"required": ["to", "cron"]}, {"required": ["to", "every"]}]
_EXAMPLE: Final[dict[str, Any]] = {
    "cron": "0 7 * * MON-FRI", "zone": "Europe/Berlin", "to": "delayer.out", "routing_key": "report", "body": "now",
}  # fmt: skip
_CATCH_UP: Final[dict[str, Any]] = {
    "anyOf": [{"enum": ["skip", "once", "all"]}, {"type": "integer", "minimum": 0, "maximum": 1000}]
}


def _table(*kinds: str) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": {"type": list(kinds)}}


@dataclass(frozen=True, slots=True)
class FieldReader:
    """Makes a field read as the command line and the file of `apply` read it."""

    name: str
    schema: dict[str, Any]

    def __get_pydantic_core_schema__(self, _source: Any, _handler: Any) -> CoreSchema:
        return no_info_plain_validator_function(FIELDS[self.name])

    def __get_pydantic_json_schema__(self, _core: Any, _handler: Any) -> dict[str, Any]:
        return self.schema


class ScheduleFields(Fields):
    """The fields of a schedule, as `delayer schedule add` and its file have them."""

    cron: Annotated[Any, FieldReader("cron", {**_TEXT, "maxLength": LONGEST})] = None
    """A cron expression of five or six fields; or every."""
    every: Annotated[Any, FieldReader("every", _DURATION)] = None
    """An interval, such as 15m."""
    zone: Annotated[Any, FieldReader("zone", _TEXT)] = None
    """The zone of cron; UTC if left out."""
    first: Annotated[Any, FieldReader("first", _INSTANT)] = None
    """No occurrence is earlier."""
    last: Annotated[Any, FieldReader("last", _LAST)] = None
    """No occurrence is later; never for no last one."""
    to: Annotated[Any, FieldReader("to", _NAME)] = None
    """The exchange of the messages; "" stands for a queue by its name."""
    routing_key: Annotated[Any, FieldReader("routing_key", _NAME)] = None
    headers: Annotated[Any, FieldReader("headers", _table("string", "number", "boolean"))] = None
    properties: Annotated[Any, FieldReader("properties", _table("string", "integer"))] = None
    """content_type, content_encoding, correlation_id, reply_to, expiration, type, app_id, priority."""
    body: Annotated[Any, FieldReader("body", _TEXT)] = None
    body_b64: Annotated[Any, FieldReader("body_b64", {"type": "string", "contentEncoding": "base64"})] = None
    catch_up: Annotated[Any, FieldReader("catch_up", _CATCH_UP)] = None
    """How many late occurrences to send: skip, once, all, or a number."""
    jitter: Annotated[Any, FieldReader("jitter", _DURATION)] = None
    max: Annotated[Any, FieldReader("max", {"type": "integer", "minimum": 0})] = None
    """End after so many occurrences; 0 for no end."""

    @property
    def given(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in FIELDS if name in self.model_fields_set}


class WholeSchedule(ScheduleFields):
    """A schedule: its rhythm, by cron or every, and the message that it sends."""

    model_config = ConfigDict(json_schema_extra={"oneOf": _NEEDS, "examples": [_EXAMPLE]})


class NewSchedule(WholeSchedule):
    """A schedule to add."""

    model_config = ConfigDict(json_schema_extra={"oneOf": _NEEDS, "examples": [{"name": "report", **_EXAMPLE}]})

    name: str
    paused: bool = False
    """Add it without an occurrence, until it is resumed."""


class ScheduleChange(ScheduleFields):
    """The fields to change, or another state."""

    state: Literal["active", "paused"] | None = None
    """active resumes a paused or failed schedule, and paused stops it."""

    @model_validator(mode="after")
    def _one(self) -> ScheduleChange:
        if bool(self.given) == (self.state is not None):
            found = "neither" if self.state is None else "both"
            raise Expected(f"either fields to change, or a state, found {found}")
        return self


class Wanted(Fields):
    """Which schedules."""

    state: Literal["active", "paused", "ended", "failed", ""] = ""
    after: Annotated[str, AfterValidator(name_or_none)] = ""
    """Begin after this name."""


class Count(Fields):
    """How many."""

    count: Annotated[int, Field(ge=1, le=MOST_TIMES)] = 5


@dataclass(frozen=True, slots=True)
class SchedulesApi:
    """The handlers."""

    pages: Pages
    change_turns: asyncio.Semaphore
    looks: asyncio.Semaphore

    @property
    def endpoints(self) -> list[Endpoint]:
        who = [("X-Delayer-Who", "Who asks for it, for the audit log.")]
        act = partial(Endpoint, role=Role.ACT, headers=who)
        return [
            Endpoint("GET", PATH, self.list_schedules, SchedulesJson, query=Wanted, problems=(404,)),
            act("POST", PATH, self.add_schedule, ScheduleJson, body=NewSchedule, status=201, problems=(404, 409)),
            Endpoint("GET", NAMED, self.show_schedule, ScheduleJson, problems=(404,)),
            act("PUT", NAMED, self.put_schedule, ScheduleJson, body=WholeSchedule, problems=(404,)),
            act("PATCH", NAMED, self.change_schedule, ScheduleJson, body=ScheduleChange, problems=(404, 409)),
            act("DELETE", NAMED, self.remove_schedule, ScheduleRemovedJson, problems=(404,)),
            act("POST", NAMED + "/run", self.run_schedule, RunJson, status=202, problems=(404,)),
            Endpoint("GET", NAMED + "/preview", self.preview_schedule, TimesJson, query=Count, problems=(404, 409)),
        ]

    async def list_schedules(self, call: Call) -> SchedulesJson:
        """List schedules in the order of their names, 50 at a time."""
        state = forms.schedule_state(call.query.state)
        async with self.looks, read_connection(self.pages.answers.url, "list schedules") as connection:
            page = await reading.find(connection, ROWS, call.query.after, state)
            held = await held_messages.count_by_schedule(connection)
        more = {"state": call.query.state, "after": page.after}
        onward = "" if page.after is None else f"{PATH}?{render.query({}, **more)}"
        return {"schedules": [as_json.schedule(one, held, whole=False) for one in page.schedules], "next": onward}

    async def show_schedule(self, call: Call) -> ScheduleJson:
        """Show a schedule."""
        async with self.looks, read_connection(self.pages.answers.url, "show a schedule") as connection:
            record = await _read(connection, call.name)
            return as_json.schedule(record, await held_messages.count_by_schedule(connection))

    async def preview_schedule(self, call: Call) -> TimesJson:
        """Compute the next times of a schedule. Jitter is not included."""
        async with self.looks, read_connection(self.pages.answers.url, "preview a schedule") as connection:
            record = await _read(connection, call.name)
        try:
            return await asyncio.to_thread(as_json.times, record, self.pages.answers.now_ms, call.query.count)
        except (BadCron, UnknownZone) as wrong:
            raise HttpProblem(409, f"{call.name} cannot be computed: {wrong}.") from None

    async def add_schedule(self, call: Call) -> Response:
        """Add a schedule."""
        new: NewSchedule = call.body

        async def add(connection: Any) -> ScheduleRecord:
            try:
                schedule = new_schedule(new.name, new.given)
                return await changes.add(connection, schedule, paused=new.paused, who=call.who)
            except ScheduleRefused:
                if await reading.get(connection, new.name) is None:
                    raise
            step = f"change it with PATCH {PATH}/{quote(new.name)}"
            raise HttpProblem(409, f"name: expected a new one, found the schedule {new.name}.", next_step=step)

        record = await self._change("add", add)
        headers = {"Location": f"{PATH}/{quote(new.name)}"}
        return JSONResponse(as_json.schedule(record), 201, headers)

    async def put_schedule(self, call: Call) -> ScheduleJson:
        """Make a schedule equal to this one, or add it. Fields that are left out have their defaults. A paused one
        stays paused."""

        async def put(connection: Any) -> ScheduleRecord | None:
            new = new_schedule(call.name, call.body.given)
            try:
                await changes.apply(connection, [new], who=call.who)
            except ScheduleRefused as refused:
                raise ScheduleRefused([one.removeprefix(f"{new.name}: ") for one in refused.problems]) from None
            return await reading.get(connection, call.name)

        record = await self._change("apply", put)
        if record is None:  # Removed in this moment.
            raise HttpProblem(404, ScheduleUnknown(call.name[:100]).reason, next_step=LISTED)
        return as_json.schedule(record)

    async def change_schedule(self, call: Call) -> ScheduleJson:
        """Change fields of a schedule, pause it or resume it. Fields that are left out stay."""
        new: ScheduleChange = call.body
        if new.state is None:

            def edited(schedule: Schedule) -> Schedule:
                return with_fields(schedule, new.given)

            edit = partial(changes.edit, name=call.name, change=edited, who=call.who)
            return as_json.schedule(await self._change("edit", edit))
        change = changes.pause if new.state == "paused" else changes.resume
        done = await self._change(new.state, partial(change, name=call.name, who=call.who), status=409)
        return as_json.schedule(done)

    async def remove_schedule(self, call: Call) -> ScheduleRemovedJson:
        """Delete a schedule with its waiting occurrence. Its messages that are held or were rescheduled stay."""
        held = await self._change("remove", partial(changes.remove, name=call.name, who=call.who))
        return {"removed": call.name, "held": held}

    async def run_schedule(self, call: Call) -> RunJson:
        """Send one more message of a schedule now, in any state."""
        run = partial(changes.run_now, name=call.name, who=call.who)
        return {"id": str(Token(await self._change("run", run)))}

    async def _change(self, doing: str, act: Callable[[Any], Awaitable[T]], status: int = 422) -> T:
        """Make a change in one transaction. ``status``: of a refusal."""

        async def acted() -> T:
            url = self.pages.answers.url
            async with self.change_turns, change_connection(url, f"schedule {doing}") as connection:
                return await act(connection)

        try:
            return await asyncio.shield(acted())
        except ScheduleUnknown as unknown:
            raise HttpProblem(404, unknown.reason, next_step=LISTED) from None
        except ScheduleRefused as refused:
            told = (one.partition(": ") for one in refused.problems)
            wrong = [wrong_field(where, text) for where, _, text in told]
            raise HttpProblem(status, f"{refused}", errors=wrong) from None
        finally:
            self.pages.answers.forget()


async def _read(connection: Any, name: str) -> ScheduleRecord:
    """Read a schedule. Raises HttpProblem, the driver's errors."""
    if (found := await reading.get(connection, name)) is None:
        raise HttpProblem(404, ScheduleUnknown(name[:100]).reason, next_step=LISTED)
    return found
