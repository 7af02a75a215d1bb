"""Changes by an operator, on the command line, the page or by a program, and sentences about their outcome."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

from asyncpg import Connection

from delayer.core.filters import Filter, Token, naming_advice
from delayer.store import held_messages, waiting
from delayer.store.admin import actions
from delayer.store.admin.actions import PAST, NewDue
from delayer.store.admin.detail import ABSENT, FoundIn, describe_absence

MATCHED: Final = "Matched"
"""The first word of the answer to a count."""
OF_HELD: Final = ("retry", "drop")
"""The verbs for held messages only. All other verbs apply to any message in the store."""


class ChangeResult(NamedTuple):
    """The messages that a change affected, or would. ``past``: what happened to them. ``of``: how many messages were
    named, or are in the queue. ``lines``: about the rest. ``found``: where each named message was. ``complete``:
    whether it affected them all."""

    past: str
    messages: int
    of: int | None = None
    lines: Sequence[str] = ()
    found: Mapping[str, str] = {}
    complete: bool = True

    @property
    def number(self) -> str:
        """How many messages, and of how many."""
        return f"{self.messages:,}" if self.of is None else f"{self.messages:,} of {self.of:,}"

    @property
    def heading(self) -> str:
        """The outcome, as an unfinished sentence."""
        return f"{self.past}: {self.number}"

    def as_dict(self) -> dict[str, Any]:
        """The result for programs."""
        count = "matched" if self.past == MATCHED else "done"
        return {"heading": self.heading, count: self.messages, "lines": list(self.lines), "found": dict(self.found)}


@dataclass(frozen=True, slots=True)
class StoredChange:
    """The change ``verb`` of all messages that match ``wanted``, or of those with ``names``, as the
    operator gave them (None for a name without a message). Its methods raise StoreLost, BadStoreUrl, SchemaOutdated."""

    url: str
    verb: str
    wanted: Filter
    names: Mapping[str, Token | None] | None = None
    when: NewDue | None = None

    async def count(self) -> ChangeResult:
        async with actions.change_connection(self.url, f"count for {self.verb}") as connection:
            if self.names is not None:
                return self._result(MATCHED, await actions.whereabouts(connection, await self._tokens(connection)))
            if self.verb in OF_HELD:
                pages = held_messages.pages(connection, self.wanted)
                return ChangeResult(MATCHED, sum([len(dues) async for dues in pages]))
            messages, broken = await waiting.count(connection, self.wanted)
        more = f"{broken} segments cannot be read and may hold more messages: see docs/backlog.md."
        return ChangeResult(MATCHED, messages, lines=[more] if broken else [])

    async def carry_out(
        self, who: str, counted: ChangeResult | None = None, say: Callable[[int], None] = lambda _done: None
    ) -> ChangeResult:
        """Change the messages and record it in the audit log. Reapplies a filter, and accounts for the messages
        ``counted`` before. ``say`` gets the running total."""
        past, verb = PAST[self.verb], f"held {self.verb}" if self.verb in OF_HELD else self.verb
        async with actions.audit_entry(self.url, who, verb, self._asked) as (connection, log_id):
            do: actions.Do = actions.retry_held if self.verb == "retry" else actions.cancel
            if self.when is not None:
                do = partial(actions.reschedule, when=self.when)
            if self.names is not None:
                tokens = await self._tokens(connection)
                return self._result(past, await actions.apply_to_ids(connection, do, tokens, log_id))
            pages = held_messages.pages if self.verb in OF_HELD else actions.waiting_pages
            messages = pages(connection, self.wanted)
            found = await actions.apply_to_matching(connection, do, messages, log_id=log_id, say=say)
        changed = actions.count_found(found)
        matched, lines = actions.describe_unchanged(found, counted and counted.messages)
        return ChangeResult(past, changed, None if changed == matched else matched, lines)

    async def _tokens(self, connection: Connection) -> list[Token]:
        """Return the messages named; only those held, if ``verb`` is for held messages."""
        tokens = [token for token in (self.names or {}).values() if token is not None]
        if self.verb not in OF_HELD:
            return tokens
        dues = dict[int, int]()
        for some in actions.portions(tokens, actions.LOOKUP_PORTION):
            dues |= held_messages.dues_of(await held_messages.find_by_id(connection, [token.id for token in some]))
        return [Token(number, due_ms) for number, due_ms in dues.items()]

    @property
    def _asked(self) -> dict[str, Any]:
        """The request for the audit log."""
        asked = self.wanted.as_dict()
        if self.names is not None:
            asked["ids"] = [
                name if token is None or name == str(token) else f"{name} ({token})"
                for name, token in self.names.items()
            ]
        if self.when is not None:
            asked |= {"by_ms": self.when.by_ms} if self.when.at_ms is None else {"at_ms": self.when.at_ms}
        return asked

    def _result(self, past: str, there: Mapping[int, FoundIn]) -> ChangeResult:
        found = {
            name: FoundIn.NOWHERE if token is None else there.get(token.id, FoundIn.NOWHERE)
            for name, token in (self.names or {}).items()
        }
        lines = [self._missing(name, where) for name, where in found.items() if where in ABSENT]
        met = len(found) - len(lines)
        places = {name: where.value for name, where in found.items()}
        return ChangeResult(past, met, len(found), lines, places, complete=not lines)

    def _missing(self, name: str, where: FoundIn) -> str:
        if self.verb in OF_HELD:
            return f"{name} is not held.{naming_advice(name)}"
        return describe_absence((self.names or {})[name] or name, where)
