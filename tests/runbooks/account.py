"""The account of messages that travel through other systems than ours: each is known by its body."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.faults.place import eventually
from tests.runbooks.desk import Desk
from tests.support.raw import Arrival, Inbox


@dataclass
class Account:
    """What is owed, by its due instant, and where it arrives."""

    desk: Desk
    inboxes: Sequence[Inbox]
    owed: dict[bytes, int] = field(default_factory=dict)

    def owe(self, body: bytes, due_ms: int) -> bytes:
        assert body not in self.owed
        self.owed[body] = due_ms
        return body

    def arrived(self) -> Counter[bytes]:
        return sum((inbox.counts for inbox in self.inboxes), Counter())

    async def arrive(self, count: int, timeout: float = 60.0) -> None:
        """Wait until so many are here."""

        async def here() -> int:
            return len(self.arrived())

        await eventually(here, lambda found: found >= count, timeout=timeout)

    async def all_back(self, timeout: float = 180.0) -> None:
        await eventually(self._missing, lambda missing: not missing, timeout=timeout)

    async def _missing(self) -> int:
        return len(self.owed.keys() - self.arrived().keys())

    def balance(self) -> None:
        """Fails where something is missing, early, changed or there twice."""
        found = self.arrived()
        arrivals: list[Arrival] = [one for inbox in self.inboxes for one in inbox.arrivals]
        late = [one.at_ms - self.owed[one.delivery.body] for one in arrivals if one.delivery.body in self.owed]
        verdict = {
            "sent": len(self.owed),
            "lost": len(self.owed.keys() - found.keys()),
            "early": sum(by < 0 for by in late),
            "changed": len(found.keys() - self.owed.keys()),
            "repeated": sum(count - 1 for count in found.values()),
        }
        told = ", ".join(f"{name} {count}" for name, count in verdict.items())
        self.desk.notes.step(f"ledger: {told}; the latest came {max(late) / 1000:.1f} s after its due instant")
        assert set(list(verdict.values())[1:]) == {0}, told


async def waiting(desk: Desk) -> int:
    """How many messages are parked."""
    return int(json.loads(await desk.quietly("status", "--json"))["store"]["waiting"])


async def parked(desk: Desk, count: int, timeout: float = 150.0) -> None:
    await eventually(lambda: waiting(desk), lambda found: found == count, timeout=timeout)
