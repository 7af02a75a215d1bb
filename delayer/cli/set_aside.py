"""delayer refused, strays: messages that wait for an operator in a queue on the broker. Both have the same verbs."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import click

from delayer.amqp.reading import raw
from delayer.broker.pipelined_admin import pipelined_admin
from delayer.cli.errors import ExitCode
from delayer.cli.options import (
    as_json,
    change_options,
    duration,
    go_on,
    headers_of,
    joined,
    kind_option,
    request_of,
    whoami,
)
from delayer.cli.output import note, print_json, print_table
from delayer.config.model import Settings
from delayer.config.topology import native_of, unread_delays
from delayer.core.readable import instant
from delayer.daemon import set_aside
from delayer.daemon.set_aside import SetAsideName
from delayer.intake.refusals import AS_IT_IS, Mend
from delayer.intake.set_aside import ANY, KEPT, SETTLED, Result, Selection, SetAsideMessage
from delayer.store.admin.actions import PAST


def _refused_row(one: SetAsideMessage) -> tuple[object, ...]:
    return one.id, one.place, one.size, one.message_id, one.reason


def _stray_row(one: SetAsideMessage) -> tuple[object, ...]:
    due_ms = one.more["due_ms"]
    due = "?" if due_ms is None else instant(due_ms)
    return one.id, due, one.place, one.more["attempts"], one.message_id, one.reason


class SetAsideQueue(NamedTuple):
    """One of the two queues, and its words. ``row`` shows a message in a table; ``right`` is the column with numbers. A
    message that a retry left in the queue "stays ``stays``". ``limit``: the messages that a list without ids looks
    at; None for KEPT. ``about``, ``retry``, ``example``: help texts, and options for their examples."""

    name: SetAsideName
    noun: str
    stays: str
    retried: str
    columns: Sequence[str]
    right: int
    row: Callable[[SetAsideMessage], tuple[object, ...]]
    limit: int | None
    about: str
    retry: str
    example: str


REFUSED: Final = SetAsideQueue(
    "refused", "refused messages", "refused", "Published again",
    ("id", "came in at", "bytes", "message_id", "reason"), 2, _refused_row, 50,
    """List, retry or drop refused messages. They could not be delayed, and are in the queue delays.refused, or in that
    of the configuration ([refused] queue).

    An ID is id: and the value of x-delayer-id, as `refused list` prints it. Any other text is a message_id.
    """,
    """Publish refused messages again. They go to the exchange that they came in by, without the headers of the refusal.

    Correct the cause first, or the headers by --delay, --set-header and --drop-header: the daemon refuses a message
    again that it still cannot delay. A relative delay counts from now. Messages stay whose route ignores --delay. A
    message leaves the refused queue when the broker has confirmed it elsewhere. Exit code 1 if some stay, or are
    refused again.
    """,
    "--reason 'too long' --route orders.in",
)  # fmt: skip
STRAYS: Final = SetAsideQueue(
    "strays", "strays", "a stray", "On their way again",
    ("id", "due", "to", "attempts", "message_id", "reason"), 3, _stray_row, None,
    """List, retry or drop strays: messages in the strays queue on the broker, where no store holds them. Their
    destination did not take them ten times, or they came too late for their route (late_limit).

    An ID is id: and the value of x-delayer-id, as `strays list` prints it. Any other text is a message_id. The audit
    log does not show changes of strays.
    """,
    """Retry strays. The daemon tries them now, and up to ten times more; late ones once more.
    """,
    "--kind late",
)  # fmt: skip


def _list(context: click.Context, /, source: SetAsideQueue, *, limit: int | None, as_json: bool, **given: Any) -> None:
    settings = request_of(context).settings()
    wanted = Selection(**given)
    # A message that an operator names may be anywhere in the queue.
    seen = asyncio.run(set_aside.look(settings, source.name, wanted, limit or (None if wanted.ids else source.limit)))
    if as_json:
        messages = [one.as_dict() for one in seen.found]
        print_json({"depth": seen.depth, "delayed": seen.delayed, "messages": messages})
        return
    if seen.found:
        print_table(source.columns, map(source.row, seen.found), right=(source.right,))
    else:
        none = f"No {source.noun} are ready." if seen.hidden else f"There are no {source.noun}."
        click.echo(f"No {source.noun} match." if seen.depth else none)
    _say_hidden(seen)
    if seen.depth > seen.looked:
        _say_cut(source, seen)


def _change(
    context: click.Context,
    /,
    source: SetAsideQueue,
    verb: str,
    *,
    everything: bool,
    dry_run: bool,
    yes: bool,
    **given: Any,
) -> None:
    """Look at the messages, ask the operator, then retry or drop exactly these."""
    mends = [given.pop(name) for name in ("delay_ms", "headers", "dropped") if name in given]
    wanted = Selection(**given)
    if everything == (wanted != ANY):
        raise click.UsageError("expected the messages: ids, a filter, or --all alone")
    settings = request_of(context).settings()
    mend = AS_IT_IS
    if mends:
        delay_ms, headers, dropped = mends
        mend = Mend.of(delay_ms, headers, map(raw, dropped), unread_delays(settings))
    seen = asyncio.run(set_aside.look(settings, source.name, wanted))
    _say_hidden(seen)
    if seen.cut:
        _say_cut(source, seen)
    missing = set() if seen.cut else wanted.ids.difference(*(one.names for one in seen.found))
    question = f"{verb.capitalize()} {len(seen.found):,} of {seen.depth:,} {source.noun}"
    some, sure = bool(seen.found), yes or bool(wanted.ids)
    fine = (some or everything) and not seen.cut
    go_on(context, question, missing, some=some, fine=fine, dry_run=dry_run, yes=sure)
    if source is REFUSED and settings.store_url is None:
        note("There is no store, and so no audit log of this.")
    if source is STRAYS and verb == "retry":
        # A retry publishes strays by an exchange of native mode to the due queue, so both must exist.
        asyncio.run(_declare(settings))
    change = set_aside.change(settings, source.name, verb, wanted, who=whoami(), mend=mend, limit=seen.looked)
    done, back = asyncio.run(change)
    click.echo(f"{source.retried if verb == 'retry' else PAST[verb]}: {len(done.found):,}.")
    for one, why in done.left:
        note(f"{min(one.names, default='a message without an id')} stays {source.stays}: {why}.")
    if source is REFUSED and verb == "retry" and done.found:
        click.echo(f"Refused again within {SETTLED:.0f} s: {back:,}.")
    if seen.cut or missing or back or len(done.found) < len(seen.found):
        context.exit(ExitCode.FOUND)


async def _declare(settings: Settings) -> None:
    async with pipelined_admin(settings.broker_url, "delayer strays") as broker:
        await broker.declare(native_of(settings))


def _say_hidden(seen: Result) -> None:
    if seen.hidden:
        note(seen.hidden)


def _say_cut(source: SetAsideQueue, seen: Result) -> None:
    note(f"The queue has {seen.depth:,} {source.noun}; only the first {seen.looked:,} were looked at.")


_SELECTING: Final = joined(
    click.argument("ids", nargs=-1, metavar="[ID]...", callback=lambda _c, _o, given: frozenset(given)),
    click.option("--reason", default="", metavar="TEXT", help="The reason contains this. Case-sensitive."),
    click.option("--route", "exchange", metavar="EXCHANGE", help="The `from` exchange of their route."),
)
"""The options of a Selection."""
_MENDING: Final = joined(
    click.option("--delay", "delay_ms", callback=duration, metavar="DURATION", help="Set x-delay, in place of others."),
    click.option("--set-header", "headers", multiple=True, callback=headers_of, metavar="NAME[:TYPE]=VALUE",
                 help="Set a header, as `delayer send --header` does. May be repeated."),
    click.option("--drop-header", "dropped", multiple=True, metavar="NAME", help="Remove a header. May be repeated."),
)  # fmt: skip


def _group(source: SetAsideQueue) -> click.Group:
    """The verbs of one queue."""
    limit = click.option(
        "--limit",
        type=click.IntRange(1, KEPT),
        help=f"Messages to look at. By default {f'{source.limit}, and with an ID ' if source.limit else ''}{KEPT:,}.",
    )
    retry = change_options(partial(_change, source=source, verb="retry"))
    verbs: dict[str, tuple[str, str, Any]] = {
        "list": (
            f"List {source.noun} from the head of their queue, with the reason. They stay in the queue. RabbitMQ can "
            "delay some itself, from 4.3 on: no list shows these, and their count is up to 12 s old.",
            source.example,
            as_json(limit(click.pass_context(partial(_list, source=source)))),
        ),
        "retry": (source.retry, f"{source.example} --dry-run", _MENDING(retry) if source is REFUSED else retry),
        "drop": (
            f"Drop {source.noun} for good.",
            "--all --yes",
            change_options(partial(_change, source=source, verb="drop")),
        ),
    }
    group = click.Group(source.name, help=source.about, short_help=f"List, retry or drop {source.noun}.")
    for verb, (text, example, command) in verbs.items():
        of = f"delayer {source.name} {verb}"
        examples = f"\b\nExamples:\n  {of} id:5f0c9a4be1d24a7c8f3e6b1d2a907c35\n  {of} {example}"
        told, short = f"{inspect.cleandoc(text)}\n\n{examples}", f"{verb.capitalize()} {source.noun}."
        of_kind = kind_option(command) if source is STRAYS else command
        group.command(verb, help=told, short_help=short)(_SELECTING(of_kind))
    return group


refused, strays = _group(REFUSED), _group(STRAYS)
