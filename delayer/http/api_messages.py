"""/api/messages: send messages, list them, cancel and reschedule them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final, Literal, NamedTuple, cast

import structlog
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, StrictStr, WithJsonSchema, model_validator

from delayer.amqp.errors import BrokerLost
from delayer.amqp.properties import entry, long_string, splice
from delayer.amqp.values import CONFIRMED, Outgoing
from delayer.config.errors import Expected, format_found
from delayer.config.texts import check_headers, instant_ms, read_base64
from delayer.config.tokens import Role
from delayer.config.values import DURATION, duration_ms
from delayer.core.errors import StoreLost, Unconfirmed
from delayer.core.filters import Filter, place_text
from delayer.core.hold import Hold
from delayer.core.marks import ID
from delayer.core.message import raw
from delayer.core.plan import Refuse
from delayer.core.readable import counted
from delayer.core.units import LATEST_MS, LONGEST_DURATION_MS
from delayer.fields import as_json
from delayer.fields.compose import Publishable, Unsendable, compose
from delayer.fields.sent import sent
from delayer.fields.shapes import ChangeJson, MessageJson, MessagesJson, SentJson, SentLineJson, SentLinesJson
from delayer.http import forms, render
from delayer.http.absence import Absence, held_instead, why_absent
from delayer.http.endpoints import JSON, LINES, Call, Clash, Endpoint, Fields, read_json
from delayer.http.pages import Pages
from delayer.http.problems import HttpProblem, WrongField, in_words, refused_field, wrong_field
from delayer.http.view import NO_STORE, ROWS
from delayer.store import held_messages, requests, waiting
from delayer.store.admin.actions import NewDue
from delayer.store.admin.changes import StoredChange
from delayer.store.session import clock_ms, read_connection

log = structlog.get_logger(__name__)

PATH: Final = "/api/messages"
MOST_LINES: Final = 1_000
MOST_WITH_EMPTY: Final = 2 * MOST_LINES + 1
MOST_BYTES: Final = 4 << 20
"""Of one request."""
PAUSE_BYTES: Final = 128 << 10
MOST_TOGETHER: Final = 25
"""The daemon's messages go on after PAUSE_BYTES of lines, or so many lines."""
LONGEST_KEY: Final = 255
"""Maximum characters of an Idempotency-Key."""
_NAMESPACE: Final = uuid.UUID("5b2b4c0e-4a4a-4f0e-9d0b-6f3f2b3a9c11")
_DURATION: Final[dict[str, Any]] = {
    "anyOf": [
        {"type": "integer", "minimum": 0, "maximum": LONGEST_DURATION_MS},
        {"type": "string", "pattern": f"^{DURATION}$", "examples": ["250ms", "10s", "30m", "12h", "30d"]},
    ]
}
_INSTANT: Final[dict[str, Any]] = {
    "anyOf": [{"type": "integer", "minimum": 0, "maximum": LATEST_MS}, {"type": "string", "format": "date-time"}]
}
_EXAMPLE: Final[dict[str, Any]] = {"routing_key": "orders.reminder", "delay": "30m", "body_json": {"order": 4711}}
_BASE64: Final[dict[str, Any]] = {"type": "string", "contentEncoding": "base64"}
_HEADERS: Final[dict[str, Any]] = {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}}


def _delay(value: object) -> int:
    if isinstance(value, str):
        return duration_ms(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= LONGEST_DURATION_MS:
        wanted = 'a delay in whole milliseconds, not negative, or a duration such as "10s", "30m", "12h" or "30d"'
        raise Expected(wanted)
    return value


def _expiration(value: object) -> object:
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise Expected('milliseconds in a string, such as "1000"')
    return value


def _due(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LATEST_MS:
        return value
    try:
        found = instant_ms(value if isinstance(value, str) else "")
    except (Expected, OverflowError):
        found = -1
    if not 0 <= found <= LATEST_MS:
        raise Expected("an instant with its offset, such as 2031-01-31T08:00:00Z, or epoch milliseconds")
    return found


def _required_by_words(schema: dict[str, Any]) -> None:
    """OpenAPI cannot say that one of two parameters is needed."""
    del schema["default"]
    schema["minLength"] = 1


def _encoded(value: object) -> bytes:
    """Encode at once, because the values take up to forty times the memory of their text. JSON has no NaN and no
    infinity, but Python reads them."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        raise Expected("a finite number") from None


Given = Annotated[str, Field(json_schema_extra=_required_by_words)]
DelayField = Annotated[int, BeforeValidator(_delay), WithJsonSchema(_DURATION)]
DueField = Annotated[int, BeforeValidator(_due), WithJsonSchema(_INSTANT)]
Name = Annotated[StrictStr, Field(max_length=255)]
PROPERTIES: Final = (
    "content_type", "content_encoding", "correlation_id", "reply_to", "type", "app_id", "priority", "expiration",
)  # fmt: skip


class NewMessage(Fields):
    """A message to send, and its delay. Of delay and due it has at most one, and at most one of body, body_json and
    body_b64. Without delay, due and the route's default_delay it is sent at once."""

    # Satisfies compose.MessageFields.
    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})

    exchange: Name | None = None
    """The exchange of a route, to which a publisher would send the message. Default: delayer.in, or the only one."""
    routing_key: Name = ""
    """The routing key, which it has at its destination too, unless the route says otherwise."""
    delay: DelayField | None = None
    """Milliseconds from now, or a duration such as "30m"; or due."""
    due: DueField | None = None
    """When it is due: RFC 3339 with an offset, or epoch milliseconds; or delay."""
    key: Annotated[StrictStr, Field(min_length=1, max_length=255)] | None = None
    """Its x-delay-key: it replaces the message that waits under this key."""
    key_mode: Literal["replace", "keep", "debounce"] | None = None
    """What it does with the message that waits under the key."""
    key_ceiling: DelayField | None = None
    """The ceiling of debounce, like delay."""
    headers: Annotated[Mapping[str, Any], BeforeValidator(check_headers), WithJsonSchema(_HEADERS)] = {}
    """AMQP headers: strings, integers of 64 bits, other numbers as doubles, booleans."""
    body: StrictStr | None = None
    """The body as text, in UTF-8; or body_json or body_b64. Without any, the body is empty."""
    body_json: Annotated[Any, AfterValidator(_encoded)] = None
    """The body as JSON; content_type is then application/json, unless given."""
    body_b64: Annotated[bytes, BeforeValidator(read_base64), WithJsonSchema(_BASE64)] | None = None
    """The body as bytes, in base64."""
    message_id: Name | None = None
    """Default: a random UUID; with an Idempotency-Key, a UUID made of that and of the request."""
    content_type: Name | None = None
    content_encoding: Name | None = None
    correlation_id: Name | None = None
    reply_to: Name | None = None
    type: Name | None = None
    app_id: Name | None = None
    priority: Annotated[int, Field(strict=True, ge=0, le=255)] | None = None
    expiration: Annotated[Name | None, BeforeValidator(_expiration)] = None
    """AMQP's own time to live in milliseconds, at the destination."""

    @model_validator(mode="after")
    def _one_of_each(self) -> NewMessage:
        wrong: list[WrongField] = []
        for names in (("delay", "due"), ("body", "body_json", "body_b64")):
            found = [name for name in names if getattr(self, name) is not None]
            if len(found) > 1:
                wrong.append(wrong_field(", ".join(found), f"one of {', '.join(names)}, found {' and '.join(found)}"))
        if wrong:
            raise Clash(wrong)
        return self

    @property
    def content(self) -> bytes:
        encoded: bytes | None = self.body_json if self.body_json is not None else self.body_b64
        return encoded if encoded is not None else (self.body or "").encode()

    @property
    def properties(self) -> dict[str, str | int]:
        kind = {} if self.body_json is None else {"content_type": "application/json"}
        return kind | {name: value for name in PROPERTIES if (value := getattr(self, name)) is not None}


class OneMessage(Fields):
    """Which messages: by their key or by their message_id."""

    key: Given = ""
    """The x-delay-key of the message that waits. The request needs this or message_id, not both."""
    message_id: Given = ""
    """The message_id that its publisher gave it. The request needs this or key, not both. Reads every waiting message.
    """


class Listing(Fields):
    """A filter: all given fields match. An empty field means any."""

    route: str = ""
    to_exchange: str = ""
    """The exchange that it goes to; amq.default for the default one."""
    to_key: str = ""
    key: str = ""
    message_id: str = ""
    header: str = ""
    """NAME=VALUE."""
    due_after: str = ""
    """An RFC 3339 instant, or a duration from now such as 2h."""
    due_before: str = ""
    after: str = ""
    """Where the page begins, as `next` of the page before has it."""


class NewTime(Fields):
    """Another due instant."""

    delay: DelayField | None = None
    """From now."""
    due: DueField | None = None

    @model_validator(mode="after")
    def _one(self) -> NewTime:
        if (self.delay is None) == (self.due is None):
            found = "neither" if self.delay is None else "both"
            raise Expected(f"either delay or due, found {found}")
        return self


class Ready(NamedTuple):
    """A message to publish, and the answer once that is confirmed. ``line``: None for a single one."""

    outgoing: Outgoing
    told: SentJson
    line: int | None


@dataclass(frozen=True, slots=True)
class MessagesApi:
    """The handlers."""

    pages: Pages
    change_turns: asyncio.Semaphore
    looks: asyncio.Semaphore

    @property
    def endpoints(self) -> list[Endpoint]:
        once = "Up to 255 characters. The same request with the same key takes effect once within a day. Needs a store."
        who = [("X-Delayer-Who", "Who asks for it, for the audit log.")]
        one = partial(Endpoint, path=PATH, role=Role.ACT, result=ChangeJson, query=OneMessage, headers=who)
        return [
            Endpoint("GET", PATH, self.list_messages, MessagesJson, query=Listing, problems=(404,)),
            Endpoint(
                "POST", PATH, self.send_messages, SentJson | SentLinesJson, Role.PUBLISH, body=NewMessage, lines=True,
                status=202, problems=(409,), headers=[("Idempotency-Key", once)],
            ),
            one("DELETE", handler=self.cancel_messages, problems=(404,)),
            one("PATCH", handler=self.reschedule_messages, body=NewTime, problems=(404,)),
            Endpoint("GET", PATH + "/{name:path}", self.show_message, MessageJson, problems=(404,)),
        ]  # fmt: skip

    async def list_messages(self, call: Call) -> MessagesJson:
        """List waiting messages, 50 at a time, in the order of their due instants."""
        given = {name: text for name, text in call.query.model_dump().items() if text}
        form = forms.searched(given, self.pages.answers.now_ms)
        after = forms.place(given.get("after", "")) or waiting.BEGINNING
        async with self.looks, read_connection(self.pages.answers.url, "list") as connection:
            found = await waiting.find(connection, form.wanted, ROWS, after)
        onward = "" if found.after is None else f"{PATH}?{render.query(form.given, after=place_text(found.after))}"
        messages = [as_json.entry(one, whole=False) for one in found.messages]
        return {"messages": messages, "bounded": found.bounded, "broken": len(found.broken), "next": onward}

    async def show_message(self, call: Call) -> MessageJson:
        """Show one message, waiting or held. Its name is its id, such as id:48213, or a message_id of its own."""
        async with self.looks:
            return as_json.message(await self.pages.one(call.request, call.name))

    async def cancel_messages(self, call: Call) -> ChangeJson:
        """Cancel the messages that wait under a key, or with a message_id. They will not be delivered."""
        return await self._change(call, "cancel", None)

    async def reschedule_messages(self, call: Call) -> ChangeJson:
        """Give the messages that wait under a key, or with a message_id, another due instant."""
        return await self._change(call, "reschedule", call.body)

    async def _change(self, call: Call, verb: str, new: NewTime | None) -> ChangeJson:
        key, message_id = call.query.key, call.query.message_id
        if bool(key) == bool(message_id):
            found = "both" if key else "neither"
            wrong = wrong_field("key, message_id", f"exactly one, and not empty, found {found}")
            raise HttpProblem(400, f"Query: {in_words([wrong])}.", errors=[wrong])
        answers = self.pages.answers
        wanted = Filter(key=raw(key)) if key else Filter(message_id=raw(message_id))
        async with self.change_turns:
            try:
                when = None if new is None else await self._due(new)
                change = StoredChange(answers.url, verb, wanted, when=when)
                result = await asyncio.shield(change.carry_out(call.who))
            finally:
                answers.forget()
        if not result.messages:
            absence = await self._why_absent(key, message_id, wanted)
            raise HttpProblem(404, absence.detail, next_step=absence.next_step)
        return {"heading": result.heading, "done": result.messages, "lines": list(result.lines), "found": {}}

    async def _why_absent(self, key: str, message_id: str, wanted: Filter) -> Absence:
        answers = self.pages.answers
        which = f"under the key {format_found(key)}" if key else f"with the message_id {format_found(message_id)}"
        async with self.looks, read_connection(answers.url, "list held messages") as connection:
            if (await held_messages.find(connection, wanted, 1)).messages:
                return held_instead(which, render.query({}, **({"key": key} if key else {"message_id": message_id})))
        return why_absent(which, answers.settings, answers.inside.state())

    async def _due(self, new: NewTime) -> NewDue:
        """Takes a connection to the store, so it needs a turn."""
        if new.delay is None:
            return NewDue(new.due)
        return NewDue(await clock_ms(self.pages.answers.url, "reschedule") + new.delay)

    async def send_messages(self, call: Call) -> SentJson | SentLinesJson:
        """Send a message, or several as JSON lines. The answer comes once the broker has confirmed them all. `where`
        says where each goes. In the store it is found once the daemon has parked it, moments later. If the daemon would
        refuse one, none is sent. If the broker takes only some, the answer is 503, and `results` has each; the same
        request with the same Idempotency-Key then sends only the rest."""
        key = call.request.headers.get("idempotency-key")
        text = await call.request.body()
        if key is None:
            return await self._send(await self._compose(call, b"", partial(asyncio.sleep, 0)))
        if not 0 < len(key) <= LONGEST_KEY:
            raise HttpProblem(400, f"Idempotency-Key: expected 1 to {LONGEST_KEY} characters, found {len(key)}.")
        if not self.pages.answers.has_store:
            raise HttpProblem(
                400,
                f"Idempotency-Key: expected none, because it needs a store, and none is configured. {NO_STORE}",
                next_step="leave the header out and give the message a message_id, by which its consumer knows a copy",
            )
        assert call.client is not None
        scope = hashlib.sha256(f"{call.client.token}\0{key}".encode("latin-1", "replace")).digest()
        # The same bytes may be a message and a line, which have different answers.
        kind = LINES if isinstance(call.body, bytes) else JSON
        content = hashlib.sha256(kind.encode() + b"\0" + text).digest()
        return await self._send_once(call, scope, content)

    async def _send_once(self, call: Call, scope: bytes, content: bytes) -> SentJson | SentLinesJson:
        done: SentJson | SentLinesJson | None = None
        part: HttpProblem | None = None
        try:
            async with self.pages.answers.requests.attempt(scope, content) as attempt:
                before = json.loads(attempt.before) if attempt.before else {}
                if "sent" in before and not before.get("failed"):
                    return _answer_of(before)
                confirmed = {one["line"]: one["sent"] for one in before.get("results", ()) if one["sent"]}
                try:
                    messages = await self._compose(call, scope + content, attempt.go_on)
                    done = await self._send(messages, confirmed)
                    attempt.answer = json.dumps(done if "results" in done else {"sent": done, "failed": 0})
                except HttpProblem as problem:
                    if "results" not in problem.more:
                        raise
                    # Not raised here, because that would roll back the answer.
                    part, results = problem, problem.more["results"]
                    attempt.answer = json.dumps({"sent": 0, "failed": 1, "results": results})
        except requests.RequestUnderWay:
            raise HttpProblem(
                409, "Idempotency-Key: another request with this key is under way.", headers={"Retry-After": "1"}
            ) from None
        except requests.OtherRequest:
            raise HttpProblem(
                422,
                "Idempotency-Key: expected the same request as before with this key, found another.",
                next_step="use another key for another request",
            ) from None
        except StoreLost as lost:
            if done is None and part is None:
                raise
            # An error would make the client send again what is sent.
            log.warning("answer not kept", reason=str(lost), next_step="a repeated request sends its messages again")
        if part is not None:
            raise part
        assert done is not None
        return done

    async def _compose(self, call: Call, seed: bytes, pause: Callable[[], Awaitable[None]]) -> list[Ready]:
        """Compose all messages. ``seed``: of their message_ids; random ones if empty. ``pause`` lets the daemon's
        messages through. Raises HttpProblem with the mistakes of all."""
        if isinstance(call.body, NewMessage):
            return [self._ready(call.body, None, seed)]
        texts = _texts(call.body)
        found: list[Ready] = []
        wrong: list[WrongField] = []
        unread = 0
        for number, text in texts:
            unread += PAUSE_BYTES // MOST_TOGETHER + len(text)
            if unread > PAUSE_BYTES:
                await pause()
                unread = 0
            try:
                found.append(self._ready(read_json(NewMessage, text, f"line {number}"), number, seed))
            except HttpProblem as problem:
                wrong += problem.more["errors"]
        if wrong:
            raise HttpProblem(422, f"Body: {in_words(wrong)}. Nothing was sent.", errors=wrong[:100])
        return found

    def _ready(self, new: NewMessage, line: int | None, seed: bytes) -> Ready:
        """Compose a message, and ask what the daemon would do with it. Raises HttpProblem."""
        inside, now_ms = self.pages.answers.inside, self.pages.answers.now_ms
        if not new.message_id and seed:
            message_id = str(uuid.uuid5(_NAMESPACE, f"{seed.hex()} {line or 0}"))
            new = new.model_copy(update={"message_id": message_id})
        where = "" if line is None else f"line {line} "
        try:
            made = compose(inside.settings, new, now_ms, new.properties)
        except Unsendable as wrong:
            raise _wrong(where + wrong.field, wrong.text) from None
        outgoing = _outgoing(made)
        plan = inside.plan(outgoing)
        if isinstance(plan, Refuse):
            about = where + _refused_field(plan.reason, new)
            raise _problem_of(refused_field(about, plan.reason))
        return Ready(outgoing, sent(made, plan), line)

    async def _send(
        self, messages: Sequence[Ready], confirmed: Mapping[int | None, SentJson] | None = None
    ) -> SentJson | SentLinesJson:
        """Publish what is not ``confirmed`` yet. Raises HttpProblem unless the broker takes it all."""
        confirmed = confirmed or {}
        left = [one for one in messages if one.line not in confirmed]
        try:
            outcomes: Sequence[object] = await self.pages.answers.inside.publish([one.outgoing for one in left])
            lost = ""
        except BrokerLost as error:
            lost = str(error)
            outcomes = error.outcomes if isinstance(error, Unconfirmed) else [None] * len(left)
        errors = {
            one.line: outcome.text if isinstance(outcome, Hold) else lost or "the broker did not confirm it"
            for one, outcome in zip(left, outcomes, strict=True)
            if outcome is not CONFIRMED
        }
        results: list[SentLineJson] = [
            {"line": one.line or 0, "sent": None, "error": errors[one.line]}
            if one.line in errors
            else {"line": one.line or 0, "sent": confirmed.get(one.line, one.told), "error": None}
            for one in messages
        ]
        if not errors:
            if messages[0].line is None:
                return messages[0].told
            return {"sent": len(messages), "failed": 0, "results": results}
        reason = next(iter(errors.values()))
        step = "run `delayer check`, and send it again; a message without a confirm may come twice"
        if messages[0].line is None:
            raise HttpProblem(503, f"The broker did not take the message: {reason}.", next_step=step)
        text = f"The broker did not take {len(errors)} of {counted(len(messages), 'message')}: {reason}."
        raise HttpProblem(503, text, next_step=step, results=results)


def _texts(body: bytes) -> list[tuple[int, bytes]]:
    """Return the lines that are not empty, with their numbers. Counts first, because millions of lines would take
    forty times the memory of the body. Raises HttpProblem."""
    lines = body.count(b"\n") + 1
    if lines > MOST_WITH_EMPTY:
        raise HttpProblem(422, f"Body: expected at most {MOST_WITH_EMPTY} lines with the empty ones, found {lines}.")
    texts = [(number, text) for number, text in enumerate(body.split(b"\n"), 1) if text.strip()]
    if not 0 < len(texts) <= MOST_LINES:
        raise HttpProblem(422, f"Body: expected 1 to {MOST_LINES} lines, found {len(texts)}.")
    return texts


def _answer_of(before: Mapping[str, Any]) -> SentJson | SentLinesJson:
    return cast(SentLinesJson, before) if "results" in before else cast(SentJson, before["sent"])


def _refused_field(reason: str, new: NewMessage) -> str:
    """The field that the daemon's reason begins with or speaks of."""
    about = reason.partition(":")[0]
    name = about.removeprefix("x-delay-").replace("-", "_")
    if about.rpartition(" ")[2].strip("'") in new.headers:
        return "headers"
    if name in NewMessage.model_fields:
        return name
    if "delay" in about or "deliver" in about or about == "timestamp":
        return "delay" if new.due is None else "due"
    return "message"


def _wrong(where: str, text: str) -> HttpProblem:
    return _problem_of(wrong_field(where, text))


def _problem_of(wrong: WrongField) -> HttpProblem:
    return HttpProblem(422, f"Body: {in_words([wrong])}.", errors=[wrong])


def _outgoing(made: Publishable) -> Outgoing:
    """The publish of a message. Its token, by which a return names it, is a leftover to the intake."""
    token = uuid.uuid4().hex.encode()
    properties = splice(made.properties, remove={ID}, append=entry(ID, long_string(token)))
    return Outgoing(made.exchange.encode(), made.routing_key.encode(), properties, made.body, token)
