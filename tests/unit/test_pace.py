"""max_rate: a bucket over time, the marks of claims, and a release that takes no more than it may."""

from __future__ import annotations

import asyncio
import random

import pytest

from delayer.core.message import Due, Target
from delayer.core.pace import BURST, Bucket, Pacer, Scope
from delayer.core.plan import Ask, AtOnce, Mode, Park, Policy, Route, decide
from delayer.services.counting import Counters
from delayer.services.release import Portion, Release
from delayer.store.marks import Marks, before
from tests.rig.fakes import NOW, Pulse, ScriptedPublisher, due

LIMITED, OTHERS = Scope(frozenset({b"slow"}), only=True), Scope(frozenset({b"slow"}), only=False)


@pytest.mark.parametrize("rate", [0.5, 1.0, 7.0, 100.0, 5000.0])
def test_never_more_than_the_rate_and_a_burst(rate: float) -> None:
    chance, now, taken = random.Random(3), 0.0, 0
    bucket = Bucket(rate, 0.0)
    while now < 60:
        got = bucket.take(chance.randrange(1, 500), now)
        unused = chance.randrange(got + 1) if got and chance.random() < 0.2 else 0
        bucket.give_back(unused)
        taken += got - unused
        assert taken <= rate * now + max(1.0, rate * BURST) + 1e-6
        now += chance.expovariate(50)


@pytest.mark.parametrize("rate", [0.5, 7.0, 100.0, 5000.0])
def test_whoever_waits_as_told_gets_nearly_all_of_it(rate: float) -> None:
    now, taken = 0.0, 0
    bucket = Bucket(rate, now)
    while now < 60:
        taken += bucket.take(10_000, now)
        now += bucket.wait(now) + 1e-6
    assert taken >= rate * 60 * 0.95


def test_a_clock_that_goes_back_gives_nothing() -> None:
    bucket = Bucket(10.0, 100.0)
    assert bucket.take(5, 100.0) == 2
    assert bucket.take(5, 50.0) == 0
    assert bucket.take(5, 50.2) == 2


def test_scopes_cover_everything_once() -> None:
    pacer = Pacer()
    assert pacer.scopes == ()
    pacer.set({b"slow": 10.0, b"slower": 1.0}, 0.0)
    for route in (b"slow", b"slower", b"any"):
        assert sum((route in scope.routes) == scope.only for scope in pacer.scopes) == 1
    kept = pacer.bucket(pacer.scopes[1])
    pacer.set({b"slow": 10.0, b"slower": 2.0}, 1.0)
    assert pacer.bucket(pacer.scopes[1]) is kept, "a reload gives no new burst"
    pacer.set({}, 2.0)
    assert pacer.scopes == ()


def test_marks() -> None:
    marks = Marks()
    assert not marks
    marks.begin([LIMITED, OTHERS], 1_000)
    marks.passed(OTHERS, before(5_000))
    assert (marks.lowest_ms, marks.highest_ms) == (999, 4_999)
    marks.note(3_000)
    assert marks.highest_ms == 2_999
    assert marks.claims(LIMITED) == before(1_000)
    marks.note(4_000)  # something was parked while it was claimed
    marks.passed(LIMITED, before(9_000))
    assert marks.claims(LIMITED) == before(4_000)
    marks.again(-(1 << 62))
    assert marks.lowest_ms == marks.highest_ms < -(1 << 42)


def test_marks_of_scopes_that_a_row_is_none_of_stay() -> None:
    marks = Marks()
    marks.begin([LIMITED, OTHERS], 1_000)
    for scope in (LIMITED, OTHERS):
        marks.claims(scope)
        marks.passed(scope, before(9_000))
    marks.note_rows([(b"slow", 2_000), (b"any", 10_000)])
    assert (marks.claims(LIMITED), marks.claims(OTHERS)) == (before(2_000), before(9_000))


def test_a_scope_goes_back_for_its_row_and_on_where_it_was() -> None:
    marks = Marks()
    marks.begin([LIMITED, OTHERS], 9_000)
    marks.note_rows([(b"any", 2_000), (b"any", 10_000), (b"slow", 1_000)])
    assert marks.claims(OTHERS) == before(2_000)
    marks.passed(OTHERS, (2_000_000, 7))
    assert marks.claims(OTHERS) == (2_000_000, 7), "there may be more of that instant"
    marks.passed(OTHERS, (2_003_000, 7))
    assert marks.claims(OTHERS) == before(9_000)


class Rows:
    """A lane's rows as a claim of one scope reads them (claiming.take_scoped), so many at once at most."""

    AT_ONCE = 6

    def __init__(self) -> None:
        self.left: dict[tuple[int, int], bytes] = {}
        self.read = 0
        self._ids = iter(range(1, 1 << 30))

    def add(self, rows: list[tuple[bytes, int]]) -> None:
        self.left |= {(due_ms * 1000, next(self._ids)): route for route, due_ms in rows}

    def claim(self, scope: Scope, place: tuple[int, int], limit: int, now: int) -> tuple[int, tuple[int, int], bool]:
        """Takes; how many, the place to go on at, and whether there may be more."""
        seen = [at for at in sorted(self.left) if at > place and at[0] <= now * 1000][: self.AT_ONCE]
        self.read += len(seen)
        meant = [at for at in seen if (self.left[at] in scope.routes) == scope.only]
        for at in (taken := meant[:limit]):
            del self.left[at]
        full = len(seen) == self.AT_ONCE or len(meant) > len(taken)
        if len(meant) > len(taken):
            return len(taken), taken[-1] if taken else place, full
        return len(taken), seen[-1] if len(seen) == self.AT_ONCE else before(now), full


@pytest.mark.parametrize("seed", range(40))
def test_marks_leave_nothing_behind(seed: int) -> None:
    """Whatever is parked, before, between and during claims: a scope that claims until there is no more has it all."""
    chance, marks, rows, now = random.Random(seed), Marks(), Rows(), 100
    slower = Scope(frozenset({b"slower"}), only=True)
    scopes = [Scope(frozenset({b"slow", b"slower"}), only=False), LIMITED, slower]
    marks.begin(scopes, 0)

    def park() -> None:
        some = [
            (chance.choice([b"slow", b"slower", b"any"]), now + chance.randrange(-60, 12))
            for _ in range(chance.randrange(4))
        ]
        rows.add(some)
        if chance.random() < 0.1 and some:
            marks.note(min(due_ms for _, due_ms in some))  # as what somebody else put there
        else:
            marks.note_rows(some)

    def claim(scope: Scope) -> bool:
        nonlocal now
        place = marks.claims(scope)
        _, after, full = rows.claim(scope, place, chance.randrange(1, 5), now)
        now += chance.randrange(3)
        if chance.random() < 0.5:
            park()
        marks.passed(scope, after)
        return full

    for _ in range(150):
        now += chance.randrange(3)
        park()
        claim(chance.choice(scopes))
        if chance.random() < 0.1:
            scope, until = chance.choice(scopes), now
            while claim(scope) or marks.claims(scope) < before(until):
                pass
            late = [at for at, route in rows.left.items() if (route in scope.routes) == scope.only]
            assert all(at > marks.claims(scope) for at in late)
        for scope in scopes:
            ours = [at for at, route in rows.left.items() if (route in scope.routes) == scope.only]
            assert all(at > marks.claims(scope) or marks._marks[scope].until >= at for at in ours)


def test_a_flood_is_read_once_whatever_comes_behind_it() -> None:
    """Old messages of the limited route go on coming, and some of another: nobody begins at the flood's head again."""
    marks, rows = Marks(), Rows()
    marks.begin([OTHERS, LIMITED], 0)
    rows.add([(b"slow", 1_000 + n) for n in range(1_000)])
    now = 10_000
    for turn in range(200):
        old = [(b"slow", 900 + turn), (b"any", 1_500)] if turn % 20 == 19 else [(b"slow", 900 + turn)]
        rows.add(old)
        marks.note_rows(old)
        _, after, _ = rows.claim(OTHERS, marks.claims(OTHERS), 1000, now)
        marks.passed(OTHERS, after)
    assert b"any" not in rows.left.values()
    assert rows.read < 1_400


class PacedLane:
    """Rows by scope; gives out what it is asked for, as a store would."""

    number, held_by_us, more, idle = 1, True, False, False

    def __init__(self, rows: dict[bytes, int]) -> None:
        self.left = dict(rows)
        self.scopes: tuple[Scope, ...] = ()
        self.claims: list[tuple[Scope | None, int]] = []
        self._ids = iter(range(1, 1 << 30))

    def pace(self, scopes: tuple[Scope, ...]) -> None:
        self.scopes = scopes

    async def claim(self, limit: int, max_bytes: int, scope: Scope | None = None) -> list[Due]:
        assert (scope is None) == (not self.scopes)
        self.claims.append((scope, limit))
        found: list[Due] = []
        for route in self.left:
            if scope is None or (route in scope.routes) == scope.only:
                count = min(self.left[route], limit - len(found))
                self.left[route] -= count
                found += [self._row(route) for _ in range(count)]
        return found

    def _row(self, route: bytes) -> Due:
        whole = due(next(self._ids))
        return whole._replace(parcel=whole.parcel._replace(route=route))

    async def settle(self, released: object, held: object) -> None:
        await asyncio.sleep(0)

    async def give_up(self) -> None:
        return

    async def sleep_hint(self) -> float:
        return 60.0


def release(lane: PacedLane, pacer: Pacer) -> Release:
    return Release(
        lane, ScriptedPublisher(), portion=Portion(messages=1000), pulse=Pulse(), counters=Counters(), pacer=pacer
    )  # type: ignore[arg-type]


async def test_a_release_takes_of_a_limited_route_what_it_may_and_of_the_others_everything() -> None:
    lane, pacer = PacedLane({b"slow": 5000, b"any": 700}), Pacer()
    pacer.set({b"slow": 100.0}, asyncio.get_running_loop().time())
    seconds = await release(lane, pacer).tick()
    assert lane.left == {b"slow": 5000 - 20, b"any": 0}
    assert seconds < 1
    one = release(lane, pacer)
    assert 0 < await one.tick() <= BURST, "it sleeps until there are tokens again"
    assert lane.left[b"slow"] == 4980


async def test_without_limits_claims_are_as_they_were() -> None:
    lane, pacer = PacedLane({b"slow": 50}), Pacer()
    one = release(lane, pacer)
    await one.tick()
    assert lane.claims == [(None, 1000)]
    pacer.set({b"slow": 1.0}, 0.0)
    await one.tick()
    assert lane.scopes == (OTHERS, LIMITED)
    pacer.set({}, 0.0)
    await one.tick()
    assert lane.scopes == ()
    assert lane.claims[-1][0] is None


def test_in_store_mode_what_is_due_at_once_is_parked_to_be_paced() -> None:
    routes = {b"in": Route(b"in", b"out", paced=True)}
    at_once = Ask(b"in", b"k", {})
    store = decide(at_once, Policy(Mode.STORE, routes, b"delays", 1000), NOW)
    native = decide(at_once, Policy(Mode.NATIVE, routes, b"delays", 1000), NOW)
    assert store == Park(NOW, Target(b"out", b"k"))
    assert isinstance(native, AtOnce)
