"""Any sequence of operations, split into batches anywhere, has the same result as one by one.

Two stores get the same operations, one in batches and one without; each is the Postgres store or its fake.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from zlib import crc32

import pytest

from delayer.core.message import REPLACE, KeyGroup, KeyMode
from delayer.core.operations import Cancel, Operation
from tests.conformance.stores import Daemon, MemoryStores, PostgresStores, Stores
from tests.support.fakes import LATE, WHY
from tests.support.postgres import Postgres
from tests.support.store import MANY, ROOM, parcel

LIMITED = b"limited"
FOREVER_MS = 1 << 40
"""A lower ceiling would give each store another due instant."""
KEYS = [b"a", b"ab", b"abc", b"b", b"ba", b"\xff", b"\xff\xff"]
"""Some are prefixes of others, so that groups have several keys, and share some."""
MODES = [REPLACE, KeyMode(keep=True), KeyMode(ceiling_ms=FOREVER_MS)]
GROUPS = [b"a", b"ab", b"b", b"\xff"]
ROUNDS = 8
LONGEST = 60


@dataclass
class Sequences:
    """Generates operations, round by round."""

    now_ms: int
    chance: random.Random
    made: int = field(default=0)

    def next(self) -> list[Operation]:
        return [self._one() for _ in range(self.chance.randrange(1, LONGEST))]

    def _one(self) -> Operation:
        chance = self.chance
        match chance.randrange(10):
            case 0:
                return Cancel(KeyGroup(chance.choice(GROUPS)))
            case 1 | 2 | 3:
                return Cancel(chance.choice(KEYS))
            case kind:
                self.made += 1
                # Due already; soon; and so late that it goes to another lane.
                due_ms = self.now_ms + chance.choice([-1_000, 90_000, 600_000])
                route = chance.choice([b"in", LIMITED])
                key = None if kind == 9 else chance.choice(KEYS)
                mode = REPLACE if key is None else chance.choice(MODES)
                return parcel(due_ms, b"%d" % self.made, route=route, key=key, mode=mode)


def cut(operations: Sequence[Operation], chance: random.Random) -> list[Sequence[Operation]]:
    """The operations in batches of random sizes."""
    batches, begin = [], 0
    while begin < len(operations):
        end = begin + chance.choice([1, 2, 5, 20, LONGEST])
        batches.append(operations[begin:end])
        begin = end
    return batches


async def apply(daemon: Daemon, batches: Sequence[Sequence[Operation]]) -> list[int]:
    """Returns the places of the cancels that met a message, among all operations."""
    met, begin = [], 0
    for batch in batches:
        met += [begin + at for at in sorted((await daemon.apply(*batch)).cancelled)]
        begin += len(batch)
    return met


async def release_and_hold(daemon: Daemon) -> None:
    """Release a third of the due messages, and hold the rest for a retry or an operator."""
    for lane in tuple(daemon.lanes):
        while rows := await lane.claimers[0].claim(MANY, ROOM):
            fate = [crc32(row.parcel.body) % 3 for row in rows]
            held = [(row, WHY if of == 1 else LATE) for row, of in zip(rows, fate, strict=True) if of]
            await lane.claimers[0].settle([row for row, of in zip(rows, fate, strict=True) if not of], held)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("batched", "single"), [("real", "real"), ("real", "memory"), ("memory", "real")])
async def test_batches_have_the_result_of_one_operation_after_another(
    postgres: Postgres, database: str, template: str, batched: str, single: str, seed: int
) -> None:
    second = postgres.add_database(template=template)
    urls = iter([database, postgres.url(second)])
    stores: list[Stores] = [MemoryStores(4) if kind == "memory" else PostgresStores(next(urls), 4)
                            for kind in (batched, single)]  # fmt: skip
    chance = random.Random(seed)
    async with stores[0].daemon([LIMITED]) as one, stores[1].daemon([LIMITED]) as other:
        await one.has(5)
        await other.has(5)
        sequences = Sequences(one.now_ms, chance)
        for _ in range(ROUNDS):
            operations = sequences.next()
            met = await apply(one, cut(operations, chance))
            assert met == await apply(other, [[operation] for operation in operations])
            assert await stores[0].standing() == await stores[1].standing()
            if chance.random() < 0.5:
                await release_and_hold(one)
                await release_and_hold(other)
        found = await stores[0].standing()
        assert found == await stores[1].standing()
        assert found[2].keys() == {"parked", "cancelled", "released", "held"}
    postgres.drop_database(second)
