"""delayer refused, strays: messages that wait for an operator in a queue on the broker. Both have the same verbs."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import click

from delayer.cli.changing import carry_out
from delayer.cli.options import as_json, change_options, duration, headers_of, joined, kind_option, request_of
from delayer.cli.output import note, print_json, print_table
from delayer.config.topology import unread_delays
from delayer.core.message import raw
from delayer.core.readable import instant
from delayer.format.refusal import NO_EDITS, RetryEdits
from delayer.set_aside.change import NOUNS, SetAsideChange, describe_unseen, find_messages
from delayer.set_aside.messages import ANY, Selection, SetAsideMessage, SetAsideName
from delayer.set_aside.queues import MAX_LISTED

LISTED: Final = 50
"""Messages that a list reads by default."""


def _refused_row(one: SetAsideMessage) -> tuple[object, ...]:
    return one.id, one.place, one.size, one.message_id, one.reason


def _stray_row(one: SetAsideMessage) -> tuple[object, ...]:
    due_ms = one.more["due_ms"]
    due = "?" if due_ms is None else instant(due_ms)
    return one.id, due, one.place, one.more["attempts"], one.message_id, one.reason


class SetAsideQueue(NamedTuple):
    """One of the two queues, and its wording. ``row``: formats a message for a table. ``right``: the column with
    numbers. ``about``, ``retry``, ``example``: help texts, and options for their examples."""

    name: SetAsideName
    noun: str
    columns: Sequence[str]
    right: int
    row: Callable[[SetAsideMessage], tuple[object, ...]]
    about: str
    retry: str
    example: str


REFUSED: Final = SetAsideQueue(
    "refused", NOUNS["refused"],
    ("id", "came in at", "bytes", "message_id", "reason"), 2, _refused_row,
    """List, retry or drop refused messages. They could not be delayed, and are in the queue delays.refused, or in that
    of the configuration ([refused] queue).

    An ID is id: and the value of x-delayer-id, as `refused list` prints it. Any other text is a message_id.
    """,
    """Publish refused messages again, to the exchange that they arrived through, without the headers of the refusal.

    First correct the cause, or the headers by --delay, --set-header and --drop-header: the daemon refuses messages
    again if it still cannot delay them. A relative delay counts from now. Messages whose route ignores --delay stay. A
    message leaves the refused queue when the broker has confirmed it elsewhere. Exit code 1 if some stay, or are
    refused again.
    """,
    "--reason 'too long' --route orders.in",
)  # fmt: skip
STRAYS: Final = SetAsideQueue(
    "strays", NOUNS["strays"],
    ("id", "due", "to", "attempts", "message_id", "reason"), 3, _stray_row,
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
    limit = limit or (None if wanted.ids else LISTED)
    seen = asyncio.run(find_messages(settings, source.name, wanted, limit))
    if as_json:
        print_json(seen.as_dict(whole=True))
        return
    if seen.found:
        print_table(source.columns, map(source.row, seen.found), right=(source.right,))
    else:
        none = f"No {source.noun} are ready." if seen.hidden else f"There are no {source.noun}."
        click.echo(f"No {source.noun} match." if seen.depth else none)
    for line in describe_unseen(
        source.name, seen, cut=seen.depth > seen.looked and not (wanted.ids and not seen.missing)
    ):
        note(line)


def _change(context: click.Context, /, source: SetAsideQueue, verb: str, *, everything: bool, **given: Any) -> None:
    edits_given = [given.pop(name) for name in ("delay_ms", "headers", "dropped") if name in given]
    wanted = Selection(**{name: given.pop(name) for name in Selection._fields if name in given})
    if everything == (wanted != ANY):
        raise click.UsageError("expected the messages: ids, a filter, or --all alone")
    settings = request_of(context).settings()
    edits = NO_EDITS
    if edits_given:
        delay_ms, headers, dropped = edits_given
        edits = RetryEdits.of(delay_ms, headers, map(raw, dropped), unread_delays(settings))
    if source is REFUSED and settings.store_url is None:
        note("There is no store, and so no audit log of this.")
    change = SetAsideChange(settings, source.name, verb, wanted, edits)
    question = f"{verb.capitalize()} {{}} {source.noun}?"
    carry_out(context, change, question, named=bool(wanted.ids), everything=everything, **given)


_SELECTING: Final = joined(
    click.argument("ids", nargs=-1, metavar="[ID]...", callback=lambda _c, _o, given: frozenset(given)),
    click.option("--reason", default="", metavar="TEXT", help="The reason contains this. Case-sensitive."),
    click.option("--route", "exchange", metavar="EXCHANGE", help="The `from` exchange of their route."),
)
"""The options of a Selection."""
_EDITING: Final = joined(
    click.option("--delay", "delay_ms", callback=duration, metavar="DURATION", help="Set x-delay, in place of others."),
    click.option("--set-header", "headers", multiple=True, callback=headers_of, metavar="NAME[:TYPE]=VALUE",
                 help="Set a header, as `delayer send --header` does. May be repeated."),
    click.option("--drop-header", "dropped", multiple=True, metavar="NAME", help="Remove a header. May be repeated."),
)  # fmt: skip


def _group(source: SetAsideQueue) -> click.Group:
    limit = click.option(
        "--limit",
        type=click.IntRange(1, MAX_LISTED),
        help=f"Messages to look at. By default {LISTED}, and with an ID all.",
    )
    retry = change_options(partial(_change, source=source, verb="retry"))
    verbs: dict[str, tuple[str, str, Any]] = {
        "list": (
            f"List {source.noun} from the head of their queue, with the reason. They stay in the queue. RabbitMQ can "
            "delay some itself, from 4.3 on: no list shows these, and their count is up to 12 s old.",
            source.example,
            as_json(limit(click.pass_context(partial(_list, source=source)))),
        ),
        "retry": (source.retry, f"{source.example} --dry-run", _EDITING(retry) if source is REFUSED else retry),
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
