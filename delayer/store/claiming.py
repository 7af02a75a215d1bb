"""The statements of one claim, and what it took. The transaction that begins here is ended by lane.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import asyncpg

from delayer.core.message import Due
from delayer.core.pace import Scope
from delayer.store import envelope, session, statements
from delayer.store.clock import StoreClock
from delayer.store.marks import Place, before
from delayer.store.retries import NEVER_MS, Turn

LONGEST_SLEEP = 60.0
BEGINNING: Place = before(session.BEGINNING_MS)
READ_AT_ONCE = 5_000
"""Rows that a claim of some routes reads at most, to find theirs among others': of those that wait, and of the held."""
HORIZON_MS = 61_000  # what can be due before somebody sleeps for LONGEST_SLEEP and wakes


@dataclass(slots=True)
class Claim:
    """What an open release transaction took."""

    watermark_after: int = session.BEGINNING_MS
    full: bool = False
    next_ms: int | None = None
    """When the next waiting row is due, if nothing waiting was taken; NEVER_MS if nothing is by the horizon."""
    rows: list[Due] = field(default_factory=list)
    passed_over_ms: int = session.BEGINNING_MS
    """Held rows whose retry was due by this instant were asked for, and not one was to be had: they are locked."""
    crowded: bool = False
    """Held rows were wanted, and what was taken before them left no bytes for any."""
    size: int = 0
    """Of ``rows`` as they were claimed; the caller may take the list apart."""
    scope: Scope | None = None
    place_after: Place = BEGINNING
    """Where the next claim of ``scope`` begins; without one, ``watermark_after`` says it."""
    held_after: Place | None = None
    """The same of held rows, if they were asked for."""


async def take(
    connection: asyncpg.Connection,
    clock: StoreClock,
    number: int,
    *,
    watermark: int,
    limit: int,
    max_bytes: int,
    turn: Turn,
) -> Claim:
    """Begin a transaction and take what is due in lane ``number``; held rows last, and by their ``turn`` a tenth of
    ``limit`` at most. A tenth of ``max_bytes`` is left for them, unless a single row is larger.

    Raises the driver's errors, and RuntimeError if a transaction is open already.
    """
    upper = clock.now_ms()
    before = clock.lower_ms()  # before the statements are sent, so not after the instants that they judge by
    retries = _retries(limit, turn)
    if connection.is_in_transaction():
        raise RuntimeError(f"lane {number}: a transaction is open that no claim began")
    await connection.execute("BEGIN")
    waiting_bytes = _without_tenth(max_bytes, retries)
    records = await connection.fetch(
        statements.CLAIM, number, watermark, upper + HORIZON_MS, limit - retries, waiting_bytes
    )
    rows = sorted(map(envelope.read, records), key=_due_then_arrival)
    taken = _bytes_of(rows)
    claim = Claim(watermark, full=len(rows) >= limit - retries or taken >= waiting_bytes, rows=rows)
    if rows:
        # Also where there are fewer than could be: what somebody cancelled while we waited for it is missing, and there
        # may be more behind it.
        claim.watermark_after = rows[-1].due_ms
    elif not claim.full:
        # Nothing at all may be such a claim as well, of which every row was cancelled. So what is next is asked for.
        soonest = await connection.fetchval(statements.NEXT_DUE, number, watermark, upper + HORIZON_MS)
        claim.next_ms = NEVER_MS if soonest is None else soonest
        claim.watermark_after = min(before, claim.next_ms)
    retries = retries or _spared(limit, turn, rows)
    if retries and (taken < max_bytes or not rows):
        held = await connection.fetch(statements.CLAIM_HELD, number, retries, max(max_bytes - taken, 1))
        rows += [_held(record) for record in held]
        if not held:
            claim.passed_over_ms = before
    elif retries:
        claim.crowded = True
    claim.size = len(rows)
    return claim


async def take_scoped(
    connection: asyncpg.Connection,
    clock: StoreClock,
    number: int,
    *,
    scope: Scope,
    place: Place,
    held_place: Place,
    limit: int,
    max_bytes: int,
    turn: Turn,
) -> Claim:
    """As :func:`take`, of some routes only, from ``place`` on; the held ones from ``held_place`` on. ``full``: there
    may be more of them, perhaps behind rows of others."""
    retries = _retries(limit, turn)
    upper, lower = clock.now_ms(), clock.lower_ms()
    if connection.is_in_transaction():
        raise RuntimeError(f"lane {number}: a transaction is open that no claim began")
    await connection.execute("BEGIN")
    due_us, id_ = place
    routes = list(scope.routes)
    records = await connection.fetch(
        statements.CLAIM_SCOPED, number, due_us // 1000, id_, upper + HORIZON_MS, limit - retries, READ_AT_ONCE, routes,
        scope.only, due_us, _without_tenth(max_bytes, retries),
    )  # fmt: skip
    seen, meant, last_us, last_id = records[0][12:16]
    taken = sorted((record["due_us"], record["id"]) for record in records if record["id"] is not None)
    rows = sorted((envelope.read(record) for record in records if record["id"] is not None), key=_due_then_arrival)
    claim = Claim(full=seen == READ_AT_ONCE or meant > len(taken), rows=rows, scope=scope)
    if meant > len(taken):
        # Bounded, or somebody else had some: the next claim begins behind the last one that was taken.
        claim.place_after = taken[-1] if taken else place
    else:
        claim.place_after = (last_us, last_id) if seen == READ_AT_ONCE else before(lower)
    size = _bytes_of(rows)
    retries = retries or _spared(limit, turn, rows)
    if retries and (size < max_bytes or not rows):
        held = await connection.fetch(
            statements.CLAIM_HELD_SCOPED, number, retries, max(max_bytes - size, 1), routes, scope.only, READ_AT_ONCE,
            *held_place,
        )  # fmt: skip
        rows += [_held(one) for one in held if one["id"] is not None]
        _look_behind(claim, held, held_place, lower)
    elif retries:
        claim.crowded = True
    claim.size = len(rows)
    return claim


def _held(record: asyncpg.Record) -> Due:
    hold = envelope.read_hold(record["kind"], record["reason"], record["may_be_delivered"], record["isolated"])
    return envelope.read(record, record["attempts"], hold, record["token"])


def _look_behind(claim: Claim, held: Sequence[asyncpg.Record], place: Place, lower_ms: int) -> None:
    """Where the next claim of held rows begins: behind what was read, but not behind what somebody else has, or what
    there were no bytes for."""
    meant = [(one["meant_us"], one["meant_id"]) for one in held if one["meant_id"] is not None]
    read_to = held[0]["read_to"]
    taken = 0
    while taken < len(meant) and held[taken]["id"] is not None:
        taken += 1
    if taken < len(meant) or read_to is None:
        claim.held_after = meant[taken - 1] if taken else place
    elif read_to:
        claim.held_after, claim.full = (read_to[0], read_to[1]), True
    else:
        claim.held_after = max(before(lower_ms), place)
    if all(one["id"] is None for one in held) and (meant or not read_to):
        claim.passed_over_ms = lower_ms


def _retries(limit: int, turn: Turn) -> int:
    """How many of a claim are for held rows, however many wait: else a backlog would keep them for ever."""
    return max(1, limit // 10) if turn is Turn.SHARE else 0


def _spared(limit: int, turn: Turn, waiting: list[Due]) -> int:
    """How many are for them where it is the turn of those that wait, and none does."""
    return limit if turn is Turn.SPARE and not waiting else 0


def _without_tenth(max_bytes: int, retries: int) -> int:
    return max_bytes - max_bytes // 10 if retries else max_bytes


def _bytes_of(rows: list[Due]) -> int:
    return sum(len(due.parcel.body) + len(due.parcel.properties) for due in rows)


def _due_then_arrival(due: Due) -> tuple[int, int]:
    return due.due_ms, due.id
