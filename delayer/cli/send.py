"""delayer send: publish messages that request a delay, as any publisher would."""

from __future__ import annotations

import asyncio
import shlex
import time
from typing import IO, Any

import click

from delayer.cli.errors import EXPECTED_ERRORS, CommandError, CommandFailed
from delayer.cli.options import Request, duration, fixed_instant, headers_of
from delayer.cli.output import note, progress, quoted
from delayer.cli.sending import DECLARED, Composed, Composer, Draft, SendReport, portions_of, publish
from delayer.core.filters import OWN
from delayer.core.message import raw
from delayer.core.readable import duration as duration_in_words
from delayer.core.readable import instant, readable


@click.command(short_help="Publish messages that ask for a delay.")
@click.option("--route", metavar="EXCHANGE", help="The `from` exchange of its route, if there are several routes.")
@click.option("--routing-key", default="", metavar="KEY", help="Its routing key at the destination.")
@click.option("--delay-key", metavar="KEY", help="Its x-delay-key: it replaces a waiting message with this key.")
@click.option("--delay", callback=duration, metavar="DURATION", help="Such as 250ms, 10s, 5m, 12h, 30d.")
@click.option("--at", callback=fixed_instant, metavar="INSTANT", help="RFC 3339, such as 2031-01-31T08:00:00Z.")
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
@click.pass_obj
def send(
    request: Request, /, *, text: str | None, body_file: IO[bytes] | None, file: IO[bytes] | None, **fields: Any
) -> None:
    """Publish messages that ask for a delay, and wait until the broker confirms them.

    A message goes to the route's exchange, with a header that says the delay, like the message of any publisher. One
    that the daemon would refuse is not sent, and the exit code is 2.

    With --file each line is a message: an object with the fields route, routing_key, delay_key, delay, at, headers,
    body (or body_b64) and message_id, like the options. The options have what a line leaves out. Lines are checked and
    sent in portions of up to 1,000. The first portion with a wrong line ends the command, before any of it is sent.

    \b
    Examples:
      delayer send --route delayer.in --routing-key orders.reminder --delay 10s --body 'hello'
      delayer send --routing-key report --at 2031-01-31T08:00:00Z --header retries:int=3
      tar c . | delayer send --routing-key backup --delay 12h --body-file -
      echo '{"routing_key": "report", "at": "2031-01-31T08:00:00Z", "body": "x"}' | delayer send --file -
    """
    if fields["delay"] is not None and fields["at"] is not None:
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
        _send_file(settings.broker_url, file, composer, draft, report)
        return
    now_ms = time.time_ns() // 1_000_000
    message = composer.compose(draft, now_ms)
    asyncio.run(publish(settings.broker_url, iter([[message]]), report))
    for _, reason in report.failed:
        raise CommandFailed(f"the broker did not take {quoted(message.message_id)}: {reason}. Next: {DECLARED}.")
    click.echo(_said(message, now_ms))
    if (key := message.cancels) is not None:
        find = f"delayer list --delay-key {shlex.quote(readable(key))}"
        note(f"Next: `{find}` shows nothing any more, if it came in time.")
        return
    one = f", and `{_look_up(message.message_id)}` the message" if settings.mode == "store" else ""
    note(f"Next: `delayer status` shows the backlog{one}.")


def _send_file(url: str, file: IO[bytes], composer: Composer, draft: Draft, report: SendReport) -> None:
    try:
        with progress("sending") as say:
            portions = portions_of(file, composer, draft)
            asyncio.run(publish(url, portions, report, lambda sent: say("sending", sent, None)))
    except (CommandError, *EXPECTED_ERRORS):
        note(f"Sent: {report.sent:,}. Next: correct the error below, and send the lines from {report.next_line} on.")
        raise
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
    if message.cancels is not None:
        return f"Sent {what} to {where}; asks to cancel the message under key {quoted(message.cancels)}."
    due_ms = message.due_ms or 0
    about = f"in {duration_in_words((due_ms - now_ms) / 1000)}" if due_ms > now_ms else "now"
    return f"Sent {what} to {where}; due {instant(due_ms)} ({about})."
