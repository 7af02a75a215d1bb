"""Every kind of fault there is, and a random but repeatable schedule of them."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final, NamedTuple

from delayer.broker.publisher import CONFIRM_TIMEOUT
from delayer.core.faultpoint import POINTS
from delayer.store.postgres import IDLE_SECONDS
from tests.faults.fault import Fault
from tests.faults.fleet import DAEMONS, Fleet
from tests.faults.injections import broker, daemons, network, store

Injection = Callable[[Fleet, Fault], Awaitable[float | None]]
TEN_MINUTES: Final = 600.0
HOUR_MS: Final = 3_600_000
MINUTE: Final = (60.0, 60.0)
EVERYTHING: Final = ("broker", "store", "peace", *(f"daemon {number}" for number in range(DAEMONS)))
ONE_OF_TWO: Final = ("daemon", "peace")
"""A fault that kills a daemon leaves the other alone."""


@dataclass(frozen=True)
class Kind:
    """``breaks``: things that no other fault may touch at the same time; "daemon" is its target. ``seconds``: its
    shortest and longest duration. ``often``: how often in ten minutes. ``details``: one of these. ``may_repeat``:
    whether it may repeat messages. ``brief``: seconds up to which a lone fault repeats nothing, as no deadline passes
    before. docs/guarantees.md says this of each."""

    inject: Injection
    breaks: Sequence[str]
    seconds: tuple[float, float]
    often: float
    details: Sequence[str] = ("",)
    may_repeat: Callable[[Fault], bool] = lambda _: True
    brief: Callable[[Fault], float] = lambda _: -1.0

    @property
    def heading(self) -> str:
        """The broken part, as the heading of the table."""
        return self.inject.__module__.rpartition(".")[2]

    def excuses(self, fault: Fault, *, alone: bool) -> bool:
        """Whether it may repeat messages. ``alone``: no other fault is near it, before or after."""
        return self.may_repeat(fault) and not (alone and fault.seconds <= self.brief(fault))


def never(_: Fault) -> bool:
    """A clean stop does not repeat messages."""
    return False


def to_the_broker(fault: Fault) -> bool:
    """A slow link to Postgres does not repeat messages; a slow link to the broker may make a publish exceed its
    deadline."""
    return fault.detail == "broker"


HALF: Final = 0.5
"""This part of a deadline: a busy machine needs the other half, as it serves waiting work late."""
OF_A_PUBLISH: Final = HALF * CONFIRM_TIMEOUT
OF_A_LANE: Final = HALF * IDLE_SECONDS


def of_the_broker(_: Fault) -> float:
    """The daemon does not abandon a publish to a known exchange before that."""
    return OF_A_PUBLISH


def of_the_store(_: Fault) -> float:
    """The store rolls back no release before that."""
    return OF_A_LANE


def of_the_line(fault: Fault) -> float:
    """The limit of the server at the other end."""
    return OF_A_PUBLISH if to_the_broker(fault) else OF_A_LANE


LINKS: Final = ("broker", "store")
_POINTS: Final = tuple(
    f"{point}:{nth}"
    for point in sorted(POINTS)
    if point.startswith(("intake.", "publish.", "park.", "release."))
    for nth in (1, 2, 7, 25)
)
"""Points of the crash tables, and the pass at which the daemon dies: the first pass may happen before any load."""

KINDS: Final[Mapping[str, Kind]] = {
    "daemon killed": Kind(daemons.killed, ONE_OF_TWO, (0.0, 2.0), 12),
    "daemon told to stop": Kind(daemons.told_to_stop, ONE_OF_TWO, (0.0, 1.0), 6, may_repeat=never),
    "daemon hangs": Kind(daemons.hanging, ONE_OF_TWO, (3.0, 10.0), 3),
    "daemon hangs for a minute": Kind(daemons.hanging, ["daemon"], MINUTE, 1),
    "daemon without memory": Kind(daemons.without_memory, ONE_OF_TWO, (0.0, 1.0), 2),
    "daemon dies at": Kind(daemons.dying_at, ONE_OF_TWO, (0.0, 1.0), 10, _POINTS),
    "daemon loses at": Kind(
        daemons.losing_at,
        ONE_OF_TWO,
        (0.0, 1.0),
        8,
        [f"{point} {loss}" for point in _POINTS for loss in ("broker-cut", "store-cut")],
    ),
    "broker dies while daemon is at": Kind(
        daemons.losing_at, [*ONE_OF_TWO, "broker"], (0.0, 1.0), 1, [f"{point} broker" for point in _POINTS]
    ),
    "store dies while daemon is at": Kind(
        daemons.losing_at, [*ONE_OF_TWO, "store"], (0.0, 1.0), 2, [f"{point} store" for point in _POINTS]
    ),
    "clock stepped": Kind(
        daemons.clock_stepped, ["daemon", "store"], (2.0, 6.0), 4, [str(HOUR_MS), str(-HOUR_MS)], may_repeat=never
    ),
    "broker killed": Kind(broker.killed, ["broker"], (0.0, 1.0), 2),
    "broker stopped": Kind(broker.stopped, ["broker"], (2.0, 8.0), 2, brief=of_the_broker),
    "broker stopped for a minute": Kind(broker.stopped, ["broker"], MINUTE, 1),
    "memory alarm": Kind(broker.memory_alarm, ["broker"], (2.0, 6.0), 2),
    "disk alarm": Kind(broker.disk_alarm, ["broker"], (2.0, 6.0), 2),
    "connections closed": Kind(broker.connections_closed, ["broker"], (0.0, 0.0), 4),
    "permissions taken away": Kind(broker.permissions_taken, ["broker"], (2.0, 5.0), 2),
    "destination deleted": Kind(broker.destination_deleted, EVERYTHING, (0.5, 2.0), 2),
    "intake queue deleted": Kind(broker.queue_deleted, EVERYTHING, (0.0, 0.0), 1),
    "50 connections lost": Kind(broker.lost_again_and_again, ["broker"], (5.0, 10.0), 2, ["delays", "delays.due"]),
    "store killed": Kind(store.killed, ["store"], (0.0, 1.0), 4),
    "store stopped": Kind(store.stopped, ["store"], (2.0, 8.0), 3, brief=of_the_store),
    "store stopped for a minute": Kind(store.stopped, ["store"], MINUTE, 1),
    "connections ended one by one": Kind(store.connections_ended, ["store"], (1.0, 4.0), 5),
    "lane locks ended": Kind(store.locks_ended, ["store"], (0.0, 2.0), 5),
    "statements cancelled": Kind(store.statements_cancelled, ["store"], (1.0, 4.0), 4),
    # A file of the WAL has 16 MB.
    "disk full": Kind(store.disk_full, ["store"], (3.0, 8.0), 3, [str(17 << 20)]),
    "long transaction": Kind(store.long_transaction, ["store"], (10.0, 20.0), 2, may_repeat=never),
    "passed partition locked": Kind(store.partition_locked, [*ONE_OF_TWO, "store"], (5.0, 10.0), 2),
    "network cut": Kind(network.cut, [], (0.0, 0.0), 20, LINKS),
    "network refuses": Kind(network.refused, [], (1.0, 4.0), 5, LINKS),
    "network half-open": Kind(network.half_open, [], (2.0, 9.0), 5, LINKS, brief=of_the_line),
    "network unheard": Kind(network.unheard, [], (1.0, 4.0), 5, LINKS),
    "network delays": Kind(network.delayed, [], (3.0, 8.0), 3, LINKS, to_the_broker, of_the_line),
    "network throttled": Kind(network.throttled, [], (3.0, 8.0), 3, LINKS, to_the_broker, of_the_line),
}


def things(fault: Fault) -> Iterator[str]:
    """Things that no other fault may touch while this one lasts."""
    kind = KINDS[fault.kind]
    for thing in kind.breaks:
        yield f"daemon {fault.target}" if thing == "daemon" else thing
    if not kind.breaks:
        yield f"link {fault.target} {fault.detail}"


async def inject(fleet: Fleet, fault: Fault) -> None:
    """Break it and heal it. Returns when the fault is over; faults that need the same things wait. Raises Missed if
    there was nothing to break."""
    async with fleet.holding(things(fault)):
        await KINDS[fault.kind].inject(fleet, fault)


class Planned(NamedTuple):
    """A fault and its time in seconds from the beginning."""

    at: float
    fault: Fault


def schedule(seed: int, seconds: float, calm: float) -> list[Planned]:
    """Faults between ``calm`` seconds after the beginning and as many before the end, of every kind in its proportion.
    In a run of ten minutes or more every kind occurs at least once."""
    chance = random.Random(seed)
    share = seconds / TEN_MINUTES
    kinds = [
        name
        for name, kind in KINDS.items()
        for _ in range(_rounded(kind.often * share, chance))
        if kind.seconds[0] < (seconds - 2 * calm) / 3  # only runs of several minutes have a minute's stop
    ]
    chance.shuffle(kinds)
    step = (seconds - 2 * calm) / max(1, len(kinds))
    turns = count(chance.randrange(DAEMONS))
    planned = []
    for position, name in enumerate(kinds):
        kind = KINDS[name]
        fault = Fault(name, next(turns) % DAEMONS, chance.uniform(*kind.seconds), chance.choice(kind.details))
        planned.append(Planned(calm + (position + chance.random()) * step, fault))
    return planned


def _rounded(number: float, chance: random.Random) -> int:
    """Round up or down by chance, so that the sum is right on average."""
    return int(number) + (chance.random() < number % 1)
