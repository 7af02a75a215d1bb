"""delayer send: publish a message that requests a delay, as any publisher would."""

from __future__ import annotations

import asyncio
import shlex
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import IO, Final

import click
from aiormq.channel import Channel as Wire
from aiormq.exceptions import ChannelNotFoundEntity, DeliveryError
from pamqp.commands import Basic

from delayer.broker.admin_connection import AdminConnection
from delayer.cli.errors import CommandFailed, Misused
from delayer.cli.options import Request, duration, fixed_instant, headers_of
from delayer.cli.output import note, quoted, some
from delayer.config.model import RouteTable, Settings
from delayer.config.texts import Scalar, duration_text
from delayer.core.delay_headers import DelayRequest, due_and_start_ms
from delayer.core.delay_sources import header_of
from delayer.core.filters import OWN
from delayer.core.plan import Route, Unacceptable, delay_of
from delayer.core.readable import duration as duration_in_words
from delayer.core.readable import instant, readable


@dataclass(slots=True)
class MessageToSend:
    """The message to publish; satisfies delay_headers.RequestProperties. ``timestamp``: epoch seconds. ``due_ms``: when
    it is due by this host's clock, epoch ms; None for a cancel."""

    exchange: str
    routing_key: str
    body: bytes
    headers: dict[str, Scalar] = field(default_factory=dict)
    timestamp: int | None = None
    due_ms: int | None = None

    def short(self, name: str) -> bytes | None:
        return None

    def names(self) -> list[bytes]:
        return [name.encode() for name in self.headers]


async def publish(url: str, message: MessageToSend, message_id: str) -> str | None:
    """Publish ``message``; None once confirmed, else the reason why not. Raises BrokerUnreachable, BrokerRefused."""
    connection = await AdminConnection.open(url, name="delayer send", patience=30.0)
    try:
        return await connection.call(partial(_publish, message=message, message_id=message_id))
    finally:
        await connection.close()


async def _publish(channel: Wire, message: MessageToSend, message_id: str) -> str | None:
    properties = Basic.Properties(
        headers={**message.headers} or None,
        delivery_mode=2,
        message_id=message_id,
        timestamp=None if message.timestamp is None else datetime.fromtimestamp(message.timestamp, UTC),
    )
    try:
        await channel.basic_publish(
            message.body,
            exchange=message.exchange,
            routing_key=message.routing_key,
            properties=properties,
            mandatory=True,
        )
    except ChannelNotFoundEntity:
        return f'exchange "{message.exchange}" does not exist'
    except DeliveryError as error:
        return "nothing is bound for it" if isinstance(error.frame, Basic.Return) else "a queue refused it"
    return None


CANCEL: Final = "x-delay-cancel"
_RELATIVE = ("x-delay", "x-opt-delivery-delay")
_ABSOLUTE = ("x-deliver-at", "x-opt-delivery-time")


@click.command(short_help="Publish a message that asks for a delay.")
@click.option(
    "--route", "route_name", metavar="EXCHANGE", help="The `from` exchange of its route, if there are several routes."
)
@click.option("--routing-key", "key", default="", metavar="KEY", help="Its routing key at the destination.")
@click.option("--delay-key", metavar="KEY", help="Its x-delay-key: it replaces a waiting message with this key.")
@click.option("--delay", "delay_ms", callback=duration, metavar="DURATION", help="Such as 250ms, 10s, 5m, 12h, 30d.")
@click.option(
    "--at", "at_ms", callback=fixed_instant, metavar="INSTANT", help="RFC 3339, such as 2031-01-31T08:00:00Z."
)
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
@click.option("--body-file", "file", type=click.File("rb"), help="The body from a file; - is stdin.")
@click.option("--message-id", metavar="ID", help="Its message_id; a random one if left out.")
@click.pass_obj
def send(
    request: Request,
    *,
    route_name: str | None,
    key: str,
    delay_key: str | None,
    delay_ms: int | None,
    at_ms: int | None,
    headers: Mapping[str, Scalar],
    text: str | None,
    file: IO[bytes] | None,
    message_id: str | None,
) -> None:
    """Publish a message that asks for a delay, and wait until the broker confirms it.

    The message goes to the route's exchange, with a header that says the delay, like the message of any publisher.

    \b
    Examples:
      delayer send --route delayer.in --routing-key orders.reminder --delay 10s --body 'hello'
      delayer send --routing-key report --at 2031-01-31T08:00:00Z --header retries:int=3
      tar c . | delayer send --routing-key backup --delay 12h --body-file -
    """
    if delay_ms is not None and at_ms is not None:
        raise click.UsageError("give either --delay or --at, not both")
    if text is not None and file is not None:
        raise click.UsageError("give either --body or --body-file, not both")
    settings = request.settings()
    route = _route(settings, route_name)
    body = file.read() if file is not None else (text or "").encode()
    keyed = {} if delay_key is None else {"x-delay-key": delay_key}
    message = prepared(route, settings.intake.queue, key, body, {**headers, **keyed})
    now_ms = time.time_ns() // 1_000_000
    ask(message, route, delay_ms, at_ms, now_ms=now_ms)
    longest_ms = settings.intake.max_delay_ms
    if message.due_ms is not None and message.due_ms - now_ms > longest_ms:
        raise Misused(
            f"the delay is longer than intake.max_delay, {duration_text(longest_ms)}: delayer would refuse it"
        )
    message_id = message_id or str(uuid.uuid4())
    if reason := asyncio.run(publish(settings.broker_url, message, message_id)):
        raise CommandFailed(
            f"the broker did not take {quoted(message_id)}: {reason}. "
            "Next: `delayer topology apply`, then `delayer check`."
        )
    click.echo(_said(message, message_id, now_ms))
    if CANCEL in message.headers:
        note(cancelling(str(message.headers[CANCEL]), settings))
        return
    one = f", and `{_look_up(message_id)}` the message" if settings.mode == "store" else ""
    note(f"Next: `delayer status` shows the backlog{one}.")


def _look_up(message_id: str) -> str:
    """Build the command that finds the message. `delayer show` treats a name that starts with id: as delayer's id."""
    find = "list --message-id" if message_id.startswith(OWN) else "show"
    return f"delayer {find} {shlex.quote(message_id)}"


def cancelling(key: str, settings: Settings) -> str:
    """Say what to do after a cancel."""
    if settings.store_url is None:
        return "Without a store nothing can be cancelled: see `delayer refused list`."
    return f"Next: `delayer list --delay-key {shlex.quote(readable(key))}` shows nothing any more, if it came in time."


def _route(settings: Settings, name: str | None) -> RouteTable:
    known = some([route.from_ for route in settings.routes])
    if name is None:
        if len(settings.routes) > 1:
            raise click.UsageError(f"--route is needed: there are several routes: {known}")
        return settings.routes[0]
    for route in settings.routes:
        if route.from_ == name:
            return route
    raise Misused(f"no route comes from exchange {quoted(name)}; expected one of {known}")


def prepared(route: RouteTable, intake: str, key: str, body: bytes, headers: Mapping[str, Scalar]) -> MessageToSend:
    """Build the message without its delay. Straight to the intake queue, its routing key names that queue, and a header
    has the destination's key."""
    message = MessageToSend(route.from_, key, body, dict(headers))
    if not route.from_:
        message.routing_key = intake
        if key:
            message.headers.setdefault("x-delay-routing-key", key)
    if len(message.routing_key.encode()) > 255:
        raise click.UsageError("--routing-key: expected at most 255 bytes")
    return message


def ask(message: MessageToSend, route: RouteTable, delay_ms: int | None, at_ms: int | None, *, now_ms: int) -> None:
    """Set the delay in ``message``, in the first form that its route reads. Without a delay, the message's own headers
    apply by the daemon's rules. Raises Misused if no form is possible, or if the daemon would refuse the delay."""
    if delay_ms is None and at_ms is None:
        if CANCEL not in message.headers:
            message.due_ms = _own_due_ms(message, route, now_ms)
        return
    forms = set(route.delay_from)
    relative = next((form for form in _RELATIVE if form in forms), None)
    absolute = next((form for form in _ABSOLUTE if form in forms), None)
    if clash := sorted({header_of(form).decode() or form for form in forms} & set(message.headers)):
        raise Misused(f"--header {clash[0]} gives the delay too: leave out --delay and --at, or this header")
    message.due_ms = due_ms = at_ms if at_ms is not None else now_ms + (delay_ms or 0)
    if delay_ms is not None and relative is not None:
        message.headers[relative] = delay_ms
    elif absolute is not None:
        message.headers[absolute] = due_ms
    elif "timestamp" in forms:
        message.timestamp = -(-due_ms // 1000)
        message.due_ms = message.timestamp * 1000
    else:
        reads = ", ".join(route.delay_from) or "none"
        raise Misused(f"route {quoted(route.from_)} cannot be told an instant: it reads {reads}. Use --delay.")


def _own_due_ms(message: MessageToSend, route: RouteTable, now_ms: int) -> int:
    rules = Route(
        route.from_.encode(),
        route.to.encode(),
        delay_from=route.delay_from,
        require_delay=route.require_delay,
        routing_key_header=route.routing_key_header.encode(),
    )
    headers = {name.encode(): value for name, value in message.headers.items()}
    request = DelayRequest(rules.source, message.routing_key.encode(), headers, message, message.body)
    try:
        asked = delay_of(request, rules, now_ms) or (route.default_delay_ms, None)
    except Unacceptable as reason:
        raise Misused(f"the daemon would refuse it: {reason}") from reason
    return due_and_start_ms(asked, request, now_ms, now_ms)[0]


def _said(message: MessageToSend, message_id: str, now_ms: int) -> str:
    what = f"message_id {message_id}"
    where = f"exchange {quoted(message.exchange)}" if message.exchange else f"queue {quoted(message.routing_key)}"
    if CANCEL in message.headers:
        return f"Sent {what} to {where}; asks to cancel the message under key {quoted(str(message.headers[CANCEL]))}."
    due_ms = message.due_ms or 0
    about = f"in {duration_in_words((due_ms - now_ms) / 1000)}" if due_ms > now_ms else "now"
    return f"Sent {what} to {where}; due {instant(due_ms)} ({about})."
