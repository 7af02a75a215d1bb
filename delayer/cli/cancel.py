"""delayer cancel, reschedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from delayer.cli.changing import change_stored
from delayer.cli.options import instant, read_as, stored_change_options
from delayer.config.texts import shift_ms
from delayer.store.admin.actions import NewDue


@click.command(short_help="Cancel messages: they are not delivered.")
@stored_change_options
def cancel(context: click.Context, /, *, names: Sequence[str], **given: Any) -> None:
    """Cancel messages by their ids, or all that match a filter (--delay-key, --route, --due-before, …; --all for all).

    An ID is what `delayer list` prints, such as id:48213@1795291200000. The part before the @ is enough: id: and the
    value of x-delayer-id. Any other text is a message_id: 5 is the message that its publisher called 5. To find one,
    the command reads every message. --delay-key finds a key at once.

    A cancelled message is not delivered. The command waits for messages that are being delivered at this moment, and
    reports messages that were delivered already. There are three exceptions. After a crash between a delivery and its
    commit, a cancel prevents the second copy only. The daemon parks a message again that a crash left in the intake
    queue. A held message whose queue did not answer ("no confirm") may be in that queue: see `delayer held list`.

    A filter matches waiting messages, in segments too. Cancel a held message by its id, or with `delayer held drop`.
    `delayer audit-log` shows every cancel. With ids --json has in "found" where each was: "waiting", "held" or
    "segment" means cancelled. Exit code 1 if an id was not found, or if nothing matched the filter.

    \b
    Examples:
      delayer cancel id:48213@1795291200000
      delayer cancel order-4711
      delayer cancel --delay-key order-4711
      delayer cancel --route mail.in --due-after 7d --dry-run
    """
    change_stored(context, "cancel", names, **given)


@click.command(short_help="Give messages another due instant.")
@click.option(
    "--at", "at_ms", callback=instant, metavar="INSTANT", help="The new instant: RFC 3339, or how long from now."
)
@click.option(
    "--by", "by_ms", callback=read_as(shift_ms), metavar="DURATION", help="Later by this, or earlier with a -."
)
@stored_change_options
def reschedule(
    context: click.Context, /, *, names: Sequence[str], at_ms: int | None, by_ms: int | None, **given: Any
) -> None:
    """Give messages another due instant, by their ids or by a filter: --at INSTANT, or --by DURATION.

    An ID is what `delayer list` prints, or its part before the @: id: and the value of x-delayer-id. Any other text is
    a message_id.

    A message keeps its id; the part behind the @ in `delayer list` is the new instant. The daemon tries a held message
    again at that instant. For a held message that waits for an operator (late, unfit), --by counts from now, or from
    its due instant if that is later. Do not repeat --by after exit code 3, because it may move some messages twice.
    --at is safe to repeat. `delayer audit-log` shows every reschedule. With ids --json has in "found" where each
    message was. Exit code 1 if an id was not found, or if nothing matched the filter.

    \b
    Examples:
      delayer reschedule id:48213@1795291200000 --at 2031-01-31T08:00:00Z
      delayer reschedule --route mail.in --due-before 1h --by 30m
      delayer reschedule --delay-key order-4711 --at 0s
    """
    if (at_ms is None) == (by_ms is None):
        raise click.UsageError("expected a new instant: either --at or --by")
    change_stored(context, "reschedule", names, NewDue(at_ms, by_ms or 0), **given)
