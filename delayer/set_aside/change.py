"""The verbs for refused messages and strays, for the command line, the page and programs. Changes of held messages have
the same methods: see store/admin/changes.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog

from delayer.broker.errors import QueueMissing
from delayer.broker.pipelined_admin import pipelined_admin
from delayer.config.model import Settings
from delayer.config.topology import cascade_of, native_of
from delayer.core.filters import naming_advice
from delayer.core.readable import counted
from delayer.format.refusal import NO_EDITS, EntryPoints, RetryEdits
from delayer.set_aside.messages import ANY, Result, Selection, SetAsideName
from delayer.set_aside.queues import REFUSE_SECONDS, Add, SetAside, refused_queue, strays_queue
from delayer.store.admin import actions, audit_log
from delayer.store.admin.actions import PAST
from delayer.store.admin.changes import MATCHED, ChangeResult

log = structlog.get_logger(__name__)

NOUNS: Final = {"refused": "refused messages", "strays": "strays"}
_RETRIED: Final = {"refused": "Published again", "strays": "On their way again"}
_STAYS: Final = {"refused": "stays refused", "strays": "stays a stray"}


def queue_of(settings: Settings, name: SetAsideName, edits: RetryEdits = NO_EDITS) -> SetAside:
    """Return the queue of refused messages or of strays. ``edits``: those of retried refused messages."""
    where = settings.broker_url, settings.management_url
    if name == "strays":
        return strays_queue(*where, cascade_of(settings), settings.native.due_queue.encode())
    entries = EntryPoints.of(settings.intake.queue, (route.from_ for route in settings.routes))
    return refused_queue(*where, settings.refused.queue, entries, edits)


async def find_messages(
    settings: Settings, name: SetAsideName, wanted: Selection = ANY, limit: int | None = None
) -> Result:
    """List the matching messages; none in store mode without a strays queue, because the store holds them. Raises
    BrokerLost, BrokerRefused, QueueMissing."""
    try:
        return await queue_of(settings, name).find(wanted, limit)
    except QueueMissing:
        if name == "refused" or settings.mode != "store":
            raise
        return Result(0)


def describe_unseen(name: SetAsideName, seen: Result, *, cut: bool) -> list[str]:
    """Say which of the queue's messages were not read."""
    lines = [seen.hidden] if seen.hidden else []
    if cut:
        lines.append(f"The queue has {seen.depth:,} {NOUNS[name]}; only the first {seen.looked:,} were looked at.")
    return lines


@dataclass(frozen=True, slots=True)
class SetAsideChange:
    """A change of one queue's matching messages: ``verb`` "retry" or "drop". Has the methods of StoredChange, so the
    command line carries out both alike. The methods raise what :func:`find_messages` raises, and TopologyMismatch,
    StoreLost, BadStoreUrl, SchemaOutdated."""

    settings: Settings
    name: SetAsideName
    verb: str
    wanted: Selection
    edits: RetryEdits = NO_EDITS

    async def count(self) -> ChangeResult:
        """Count the messages that would change."""
        seen = await find_messages(self.settings, self.name, limit=0)
        if self.wanted == ANY and not seen.may_delay:  # The broker's count needs no reading.
            return ChangeResult(MATCHED, seen.depth, seen.depth)
        seen = await find_messages(self.settings, self.name, self.wanted)
        return self._result(MATCHED, seen, seen.matched)._replace(of=seen.depth)

    async def carry_out(
        self, who: str, counted: ChangeResult | None = None, say: Callable[[int], None] = lambda _done: None
    ) -> ChangeResult:
        """Change the messages, but not those that came after ``counted``. ``say`` gets the number changed. With a
        store, a change of refused messages gets an audit-log entry; any other change is logged."""
        queue = queue_of(self.settings, self.name, self.edits)
        limit, changed = None if counted is None else counted.of, 0
        past = _RETRIED[self.name] if self.verb == "retry" else PAST[self.verb]
        if self.name == "strays" and not (seen := await find_messages(self.settings, self.name, limit=1)).depth:
            return self._result(past, seen, 0)

        async def add(record: Add, messages: int) -> None:
            nonlocal changed
            await record(messages)
            changed += messages
            say(changed)

        if self.name == "strays" and self.verb == "retry":
            # It publishes through an exchange of native mode to the due queue, so both must exist.
            async with pipelined_admin(self.settings.broker_url, "delayer strays") as broker:
                await broker.declare(native_of(self.settings))
        if self.name == "refused" and (url := self.settings.store_url) is not None:
            request = {**self.wanted.as_dict(), **self.edits.request}
            async with actions.audit_entry(url, who, f"refused {self.verb}", request) as (connection, log_id):
                record = partial(audit_log.add, connection, log_id)
                done = await queue.change(self.verb, self.wanted, partial(add, record), limit)
        else:
            done = await queue.change(self.verb, self.wanted, partial(add, partial(self._log, who)), limit)
        result = self._result(past, done, done.changed)
        if counted is not None and not self.wanted.ids and (gone := counted.messages - done.matched) > 0:
            lines = [*result.lines, f"{gone:,} were no longer in the queue."]
            result = result._replace(of=counted.messages, lines=lines)
        if self.name == "strays" or self.verb != "retry" or not done.changed:
            return result
        again = await queue.count_returned(done)
        lines = [*result.lines, f"Refused again within {REFUSE_SECONDS:.0f} s: {again:,}."]
        return result._replace(lines=lines, complete=result.complete and not again)

    async def _log(self, who: str, messages: int) -> None:
        if messages:
            ids = sorted(self.wanted.ids)
            log.warning("set aside acted on", queue=self.name, verb=self.verb, messages=messages, ids=ids, who=who)

    def _result(self, past: str, done: Result, messages: int) -> ChangeResult:
        lines = describe_unseen(self.name, done, cut=False)
        for one, why in done.remaining:
            lines.append(f"{min(one.names, default='a message without an id')} {_STAYS[self.name]}: {why}.")
        stay = done.matched - done.changed if past != MATCHED else 0
        if stay > len(done.remaining):
            lines.append(f"{stay - len(done.remaining):,} more stay there.")
        lines += [f"{name} is not in the queue.{naming_advice(name)}" for name in sorted(done.missing)]
        unread = 0 if done.may_delay else done.unread
        if unread:
            lines.append(
                f"Not read: {counted(unread, 'message')}, which another consumer has. Next: run the command again."
            )
        complete = not (stay or done.missing or unread)
        return ChangeResult(past, messages, len(self.wanted.ids) or None, lines, complete=complete)
