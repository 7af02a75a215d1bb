"""delayer send: publish messages that request a delay, as any publisher would. The messages are composed of options or
lines of JSON, and checked by the daemon's rules."""

from __future__ import annotations

import asyncio
import difflib
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Annotated, Any, Final, NamedTuple, Self

import click
from aiormq.channel import Channel as Wire
from aiormq.exceptions import ChannelClosed, ChannelNotFoundEntity, DeliveryError
from pamqp.commands import Basic
from pydantic import BeforeValidator, Field, ValidationError

from delayer.amqp.framing import DEFAULT_FRAME_MAX, header_limit
from delayer.amqp.values import Delivery
from delayer.broker.admin_connection import AdminConnection
from delayer.broker.pipelined_admin import PATIENCE
from delayer.cli.errors import EXPECTED_ERRORS, CommandError, CommandFailed, Misused
from delayer.cli.options import Request, as_json, duration, fixed_instant, headers_of
from delayer.cli.output import note, print_json, progress, quoted
from delayer.config.errors import Expected, format_found
from delayer.config.model import Settings, Table
from delayer.config.texts import check_headers, instant_ms, read_base64
from delayer.config.values import DurationMs
from delayer.core.filters import OWN
from delayer.core.message import raw
from delayer.core.plan import Refuse
from delayer.core.readable import duration as duration_in_words
from delayer.core.readable import instant, readable
from delayer.daemon.live_settings import policy_of
from delayer.fields.compose import Unsendable, compose
from delayer.fields.sent import sent
from delayer.fields.shapes import SentJson
from delayer.intake.handle import classify

DECLARED: Final = "`delayer topology apply`, or wait until `delayer run` logs ready; then `delayer check`"
"""The next step after a message that the broker did not take."""
PORTION: Final = 1_000
"""The most messages that are checked, and then published, together."""
PORTION_BYTES: Final = 4 << 20
"""The most bytes of their bodies, unless it is one message."""


def _instant(value: object) -> int:
    return instant_ms(value if isinstance(value, str) else "")


class Draft(Table):
    """A message's fields, by the names that the API has for them. The fields of a line override those of the command.
    Times are in ms."""

    exchange: str | None = None
    routing_key: str = ""
    key: str | None = None
    key_mode: str | None = None
    key_ceiling: DurationMs | None = None
    delay: DurationMs | None = None
    due: Annotated[int, BeforeValidator(_instant)] | None = None
    headers: Annotated[Mapping[str, Any], BeforeValidator(check_headers)] = Field(default_factory=dict)
    body: bytes = b""
    body_b64: Annotated[bytes, BeforeValidator(read_base64)] = b""
    message_id: str | None = None

    @property
    def content(self) -> bytes:
        return self.body

    def with_line(self, text: bytes) -> Self:
        """This draft with the fields of a line of JSON. Raises Misused."""
        try:
            line = Draft.model_validate_json(text)
        except ValidationError as error:
            raise Misused(_expected(error)) from None
        given = {name: getattr(line, name) for name in line.model_fields_set}
        for one, other in (("delay", "due"), ("body", "body_b64")):
            if one in given and other in given:
                raise Misused(f"expected {one} or {other}, found both")
        if "delay" in given or "due" in given:
            given = {"delay": None, "due": None, **given}
        given["headers"] = {**self.headers, **line.headers}
        return self.model_copy(update={"body": line.body_b64, **given} if "body_b64" in given else given)


def _expected(wrong: ValidationError) -> str:
    error = wrong.errors(include_url=False, include_input=False)[0]
    cause = error.get("ctx", {}).get("error")
    if error["type"] == "extra_forbidden":
        name = str(error["loc"][0])
        near = difflib.get_close_matches(name, Draft.model_fields, 1)
        hint = f"; did you mean {format_found(near[0])}?" if near else ""
        return f"expected a field of {', '.join(Draft.model_fields)}, found {format_found(name)}{hint}"
    place = "".join(f"{part}: " for part in error["loc"])
    return place + (f"expected {cause}" if isinstance(cause, Expected) else error["msg"])


class Composed(NamedTuple):
    """A message to publish. ``told``: what --json says about it, by this host's clock. ``line``: of the file; 0 without
    a file."""

    exchange: str
    routing_key: str
    properties: bytes
    body: bytes
    told: SentJson
    line: int

    @property
    def message_id(self) -> str:
        return self.told["message_id"]


class _Encoded(Basic.Properties):
    """A message's properties as they are. The driver identifies a returned message by its ``message_id``."""

    def __init__(self, message: Composed) -> None:
        super().__init__(message_id=message.message_id)
        self._encoded = message.properties

    def marshal(self) -> bytes:
        return self._encoded


def _option(field: str) -> str:
    """The option for a field."""
    return next(one.opts[0] for one in send.params if one.name == field)


class Composer:
    """Composes messages for these settings."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._policy = policy_of(settings, has_store=settings.store_url is not None)

    def compose(self, draft: Draft, now_ms: int, line: int = 0) -> Composed:
        """Raises Misused if the message cannot be sent, or if the daemon would refuse it."""
        try:
            made = compose(self._settings, draft, now_ms)
        except Unsendable as wrong:
            raise Misused(f"{wrong.field if line else _option(wrong.field)}: {wrong.text}") from None
        exchange, key = made.exchange.encode(), made.routing_key.encode()
        delivery = Delivery(0, False, exchange, key, made.properties, made.body)
        _, _, plan = classify(delivery, self._policy, now_ms, header_limit(DEFAULT_FRAME_MAX))
        if isinstance(plan, Refuse):
            raise Misused(f"the daemon would refuse it: {plan.reason}")
        return Composed(*made, told=sent(made, plan), line=line)


def portions_of(file: IO[bytes], composer: Composer, draft: Draft) -> Iterator[list[Composed]]:
    """The messages of the lines, in portions of bounded size, each checked as a whole. ``draft`` has what lines leave
    out. Raises Misused for a portion with a line that cannot be sent."""
    portion: list[Composed] = []
    ids: set[str] = set()
    size = 0
    for number, text in enumerate(file, 1):
        if not text.strip():
            continue
        try:
            one = composer.compose(draft.with_line(text), time.time_ns() // 1_000_000, number)
        except Misused as wrong:
            raise Misused(f"line {number}: {wrong}") from None
        size += len(one.body)
        # The driver identifies returned messages by their ids, so a portion has each id once.
        if portion and (len(portion) == PORTION or size > PORTION_BYTES or one.message_id in ids):
            yield portion
            portion, ids, size = [], set(), len(one.body)
        portion.append(one)
        ids.add(one.message_id)
    if portion:
        yield portion


@dataclass(slots=True)
class SendReport:
    """The messages so far: those that the broker confirmed, and those that it did not take, with the reasons.
    ``next_line``: the first line that may not have been sent."""

    sent: int = 0
    failed: list[tuple[Composed, str]] = field(default_factory=list)
    next_line: int = 1


async def publish(
    url: str, portions: Iterator[Sequence[Composed]], report: SendReport, say: Callable[[int], None] = lambda _: None
) -> None:
    """Publish portion after portion, until the broker does not take a message. ``report`` has what was published, also
    after an error. Raises Misused, CommandFailed, BrokerUnreachable, BrokerRefused."""
    connection = await AdminConnection.open(url, name="delayer send", patience=PATIENCE)
    try:
        # In a thread, because a pipe may be silent for longer than a heartbeat.
        while not report.failed and (portion := await asyncio.to_thread(next, portions, None)):
            try:
                results = await connection.call(partial(_publish, portion=portion))
            except ChannelClosed as closed:
                first, last = portion[0].line, portion[-1].line
                where = "" if not last else f"line {first}: " if first == last else f"lines {first} to {last}: "
                they = "it" if first == last else "them"
                step = DECLARED if isinstance(closed, ChannelNotFoundEntity) else "correct what the broker names"
                raise CommandFailed(f"{where}the broker did not take {they}: {closed}. Next: {step}.") from closed
            for one, error in zip(portion, results, strict=True):
                if isinstance(error, DeliveryError):
                    returned = isinstance(error.frame, Basic.Return)
                    report.failed.append((one, "nothing is bound for it" if returned else "a queue refused it"))
            report.sent += len(portion) - len(report.failed)
            report.next_line = portion[-1].line + 1
            say(report.sent)
    finally:
        await connection.close()


async def _publish(channel: Wire, portion: Sequence[Composed]) -> list[object]:
    """The errors of refused messages, and the confirms of the rest. Raises an error that concerns them all."""
    results = await asyncio.gather(
        *(
            channel.basic_publish(
                one.body, exchange=one.exchange, routing_key=one.routing_key, properties=_Encoded(one), mandatory=True
            )
            for one in portion
        ),
        return_exceptions=True,
    )
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, DeliveryError):
            raise result
    return list(results)


@click.command(short_help="Publish messages that ask for a delay.")
@click.option(
    "--route", "exchange", metavar="EXCHANGE", help="The `from` of its route. [default: delayer.in, or the only one]"
)
@click.option("--routing-key", default="", metavar="KEY", help="Its routing key at the destination.")
@click.option("--delay-key", "key", metavar="KEY", help="Its x-delay-key: it replaces a waiting message with this key.")
@click.option(
    "--delay-key-mode",
    "key_mode",
    metavar="MODE",
    help="replace (the default), keep (throttles) or debounce (postpones).",
)
@click.option(
    "--delay-key-ceiling",
    "key_ceiling",
    callback=duration,
    metavar="DURATION",
    help="The ceiling of debounce, such as 5m.",
)
@click.option("--delay", callback=duration, metavar="DURATION", help="Such as 250ms, 10s, 5m, 12h, 30d.")
@click.option("--at", "due", callback=fixed_instant, metavar="INSTANT", help="RFC 3339, such as 2031-01-31T08:00:00Z.")
@click.option(
    "--header",
    "headers",
    multiple=True,
    callback=headers_of,
    metavar="NAME[:TYPE]=VALUE",
    help="A header. TYPE is str (the default), int, float or bool. A NAME with a colon needs it: "
    "a:b:str=c. May be repeated.",
)
@click.option("--body", "text", default=None, help="The body, as text.")
@click.option("--body-file", type=click.File("rb"), help="The body from a file; - is stdin.")
@click.option("--message-id", metavar="ID", help="Its message_id; a random one if left out.")
@click.option("--file", type=click.File("rb"), help="Messages from lines of JSON; - is stdin. See below.")
@as_json
@click.pass_obj
def send(
    request: Request,
    /,
    *,
    text: str | None,
    body_file: IO[bytes] | None,
    file: IO[bytes] | None,
    as_json: bool,
    **fields: Any,
) -> None:
    """Publish messages that ask for a delay, and wait until the broker confirms them.

    A message goes to the route's exchange, with a header that says the delay, like the message of any publisher. A
    message that the daemon would refuse is not sent, and the exit code is 2.

    With --file each line is a message: an object with the fields exchange (of a route), routing_key, key, key_mode,
    key_ceiling, delay, due, headers, body (or body_b64) and message_id, named as in the API, and no others: body_json
    and AMQP's properties are for the API only. The options supply what a line leaves out. Lines are checked and sent in
    portions of up to 1,000. The first portion with a wrong line ends the command, before any of it is sent.

    --json prints the message's id, when it is due, and where it goes: the store, the broker, or its destination at
    once. With --file it prints how many were sent, and those that were not.

    \b
    Examples:
      delayer send --route delayer.in --routing-key orders.reminder --delay 10s --body 'hello'
      delayer send --routing-key report --at 2031-01-31T08:00:00Z --header retries:int=3
      tar c . | delayer send --routing-key backup --delay 12h --body-file -
      echo '{"routing_key": "report", "due": "2031-01-31T08:00:00Z", "body": "x"}' | delayer send --file -
    """
    if fields["delay"] is not None and fields["due"] is not None:
        raise click.UsageError("give either --delay or --at, not both")
    if text is not None and body_file is not None:
        raise click.UsageError("give either --body or --body-file, not both")
    if file is not None and (text, body_file, fields["message_id"]) != (None, None, None):
        raise click.UsageError("--file: give the bodies and the ids of messages in their lines")
    settings = request.settings()
    body = body_file.read() if body_file is not None else raw(text or "")
    draft = Draft.model_construct(body=body, **fields)
    composer, report = Composer(settings), SendReport()
    if file is not None:
        _send_file(settings.broker_url, file, composer, draft, report, as_json=as_json)
        return
    now_ms = time.time_ns() // 1_000_000
    message = composer.compose(draft, now_ms)
    asyncio.run(publish(settings.broker_url, iter([[message]]), report))
    for _, reason in report.failed:
        raise CommandFailed(f"the broker did not take {quoted(message.message_id)}: {reason}. Next: {DECLARED}.")
    if as_json:
        print_json(message.told)
        return
    click.echo(_said(message, now_ms))
    if (key := message.told["cancels"]) is not None:
        find = f"delayer list --delay-key {shlex.quote(readable(key))}"
        note(f"Next: `{find}` shows nothing any more, if it came in time.")
        return
    one = f", and `{_look_up(message.message_id)}` the message" if settings.mode == "store" else ""
    note(f"Next: `delayer status` shows the backlog{one}.")


def _send_file(
    url: str, file: IO[bytes], composer: Composer, draft: Draft, report: SendReport, *, as_json: bool
) -> None:
    try:
        with progress("sending") as say:
            portions = portions_of(file, composer, draft)
            asyncio.run(publish(url, portions, report, lambda sent: say("sending", sent, None)))
    except (CommandError, *EXPECTED_ERRORS):
        note(f"Sent: {report.sent:,}. Next: correct the error below, and send the lines from {report.next_line} on.")
        raise
    if as_json:
        left = [{"line": one.line, "message_id": one.message_id, "error": reason} for one, reason in report.failed]
        print_json({"sent": report.sent, "failed": left, "next_line": report.next_line})
    else:
        click.echo(f"Sent: {report.sent:,}. Not taken: {len(report.failed):,}.")
    for one, reason in report.failed:
        note(f"line {one.line}: the broker did not take {quoted(one.message_id)}: {reason}.")
    if report.failed:
        raise CommandFailed(f"Next: {DECLARED}; then send these lines again, and those from {report.next_line} on.")


def _look_up(message_id: str) -> str:
    """Build the command that finds the message. `delayer show` treats a name that starts with id: as delayer's id."""
    find = "list --message-id" if message_id.startswith(OWN) else "show"
    return f"delayer {find} {shlex.quote(message_id)}"


def _said(message: Composed, now_ms: int) -> str:
    what = f"message_id {readable(message.message_id)}"
    where = f"exchange {quoted(message.exchange)}" if message.exchange else f"queue {quoted(message.routing_key)}"
    due_ms = message.told["due_ms"]
    if due_ms is None:
        under = f" under key {quoted(key)}" if (key := message.told["cancels"]) is not None else ""
        return f"Sent {what} to {where}; asks to cancel the message{under}."
    about = f"in {duration_in_words((due_ms - now_ms) / 1000)}" if due_ms > now_ms else "now"
    return f"Sent {what} to {where}; due {instant(due_ms)} ({about})."
