"""Listing and showing messages in every place, and acting on all messages of a filter."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from typing import Any

import asyncpg
import pytest

from delayer.core.filters import Filter, Token
from delayer.core.units import DAY_MS
from delayer.format import reading
from delayer.store import held_messages, waiting
from delayer.store.admin import actions, audit_log, detail
from delayer.store.admin.actions import NewDue
from delayer.store.admin.detail import FoundIn
from delayer.store.segments import catalog
from delayer.store.waiting import BEGINNING
from tests.integration.segments_store import START_MS, store
from tests.support.fakes import WHY
from tests.support.raw import Props, text
from tests.support.rows import Row, compact, conserved, everything, put, row, rows
from tests.support.store import opened, owned, parcel, sql

FAR_MS = START_MS + 900 * DAY_MS
"""An instant beyond every partition: its rows are in the default one."""


def mixed(count: int = 300) -> list[Row]:
    """Rows of three lanes, at odd microseconds, many at one instant, some far away, of two routes."""
    chance = random.Random(3)
    made = []
    for number in range(1, count + 1):
        due_ms = chance.choice([START_MS, START_MS + chance.randrange(12 * DAY_MS), FAR_MS + number % 7])
        one = row(number, due_ms, lane=1 + number % 3)
        headers = ((b"customer", text(str(number % 10))),)
        one = one._replace(due_us=one.due_us + chance.choice([0, 1, 999]), properties=Props(headers=headers).encode())
        made.append(one._replace(route=b"a" if number % 4 else b"b", to_key=b"k%d" % (number % 5)))
    return made


def order(some: list[Row]) -> list[int]:
    return [one.id for one in sorted(some, key=lambda one: (one.due_us, one.id))]


async def paged(admin: asyncpg.Connection, wanted: Filter, limit: int, **more: Any) -> list[int]:
    """The ids of all pages, one after the other."""
    ids: list[int] = []
    after: tuple[int, int] | None = BEGINNING
    pages = 0
    while after is not None:
        found = await waiting.find(admin, wanted, limit, after, **more)
        assert len(found.messages) == limit or found.bounded or found.after is None
        assert found.after is None or found.after > after
        ids += [entry.place.id for entry in found.messages]
        after = found.after
        pages += 1
        assert pages < 2000
    return ids


FILTERS = {
    "all": Filter(),
    "from": Filter(due_from_ms=START_MS + DAY_MS),
    "before": Filter(due_before_ms=START_MS + 6 * DAY_MS),
    "one instant": Filter(due_from_ms=START_MS, due_before_ms=START_MS + 1),
    "route": Filter(route=b"b"),
    "destination": Filter(to_exchange=b"delayer.out", to_key=b"k3"),
    "header": Filter(headers=((b"customer", "7"),)),
    "much": Filter(route=b"a", due_from_ms=START_MS + 1, headers=((b"customer", "3"),)),
    "none": Filter(route=b"nobody's"),
}


def expected(some: list[Row], wanted: Filter) -> list[int]:
    return order(
        [
            one
            for one in some
            if wanted.in_range(one.due_us // 1000)
            and (wanted.route is None or wanted.route == one.route)
            and (wanted.to_key is None or wanted.to_key == one.to_key)
            and reading.has_properties(one.properties, wanted)
        ]
    )


@pytest.mark.parametrize("packed", ["rows", "half", "segments"])
async def test_every_page_of_every_filter(database: str, packed: str) -> None:
    some = mixed(200 if packed == "rows" else 60)
    async with store(database, 8) as admin:
        await put(admin, some)
        if packed != "rows":
            await compact(admin, START_MS + 4 * DAY_MS if packed == "half" else 0, rows=10)
            assert (await catalog.count(admin)).segments > 2
        for name, wanted in FILTERS.items():
            meant = expected(some, wanted)
            # With segments each page unpacks some of them.
            for limit, more in ((7, {}), (1000, {}), (5, {"scan": 30})) if packed == "rows" else ((20, {"scan": 30}),):
                assert await paged(admin, wanted, limit, **more) == meant, (name, limit)
            counted = await waiting.count(admin, wanted)
            assert counted == (len(meant), 0), name


async def test_lists_of_stores_without_rows_or_without_lanes(database: str) -> None:
    async with store(database) as admin:
        assert await paged(admin, Filter(), 10) == []
        await put(admin, [row(1, START_MS, lane=7)])
        assert await paged(admin, Filter(), 10) == [1]


async def test_by_key(database: str) -> None:
    async with store(database) as admin:
        await put(admin, [row(1, START_MS, key=b"one"), row(2, START_MS, key=b"two"), row(3, START_MS)])
        assert await paged(admin, Filter(key=b"two"), 10) == [2]
        assert await paged(admin, Filter(key=b"three"), 10) == []
        assert await paged(admin, Filter(key=b"two", route=b"nobody's"), 10) == []
        assert await waiting.count(admin, Filter(key=b"one")) == (1, 0)


async def test_a_broken_segment_is_reported(database: str) -> None:
    async with store(database) as admin:
        await put(admin, rows(20, START_MS))
        await compact(admin)
        await admin.execute("UPDATE segment SET packed = set_byte(packed, 99, get_byte(packed, 99) # 255)")
        found = await waiting.find(admin, Filter(), 10)
        assert (list(found.messages), len(found.broken), found.after) == ([], 1, None)
        assert (await waiting.count(admin, Filter(route=b"delayer.in")))[1] == 1
        assert await detail.find_message(admin, Token(5)) is FoundIn.UNREADABLE


async def test_a_page_keeps_no_more_messages_of_segments_than_it_shows(database: str) -> None:
    """Ten compactions of the same days: every segment reaches over the first place of the page."""
    async with store(database, 2) as admin:
        everyone: list[Row] = []
        for week in range(10):
            some = rows(40, START_MS, first_id=1 + 40 * week, seed=week)
            await put(admin, some)
            await compact(admin)
            everyone += some
        places = sorted((one.due_us, one.id) for one in everyone)
        after, listed = places[100], []
        for _ in range(40):
            found = await waiting.find(admin, Filter(), 10, after)
            assert len(found.messages) <= 10
            listed += [one.place[:2] for one in found.messages]
            if found.after is None:
                break
            after = found.after
        assert listed == places[101:]


async def test_show_finds_a_message_in_every_place(database: str) -> None:
    async with opened(database) as place, owned(place) as [lane], sql(database) as admin:
        now = place.now_upper_ms()
        await place.park(lane, [parcel(now + DAY_MS, b"a")], [])
        await compact(admin)
        await place.park(lane, [parcel(now + 2 * DAY_MS, b"b", key=b"k")], [])
        await place.hold(lane, [(parcel(now, b"c"), WHY)])
        ids = {one.body: one.id for one in (await everything(admin)).values()}
        ids |= dict(await admin.fetch("SELECT body, id FROM held"))
        dues = {b"a": now + DAY_MS, b"b": now + 2 * DAY_MS, b"c": now}
        wheres = {b"a": FoundIn.SEGMENT, b"b": FoundIn.WAITING, b"c": FoundIn.HELD}
        for body, where in wheres.items():
            for token in (Token(ids[body]), Token(ids[body], dues[body])):
                found = await detail.find_message(admin, token)
                assert not isinstance(found, FoundIn)
                assert (found.where, found.entry.body, found.entry.sound, found.owned) == (where, body, True, True)
                assert found.entry.place.due_us == dues[body] * 1000
                assert (found.held is not None) == (where is FoundIn.HELD)
        assert await detail.find_message(admin, Token(ids[b"b"], now)) is FoundIn.NOWHERE
        assert await detail.find_message(admin, Token(999)) is FoundIn.NOWHERE
        do = actions.cancel
        act = await audit_log.begin(admin, "me", "cancel", {})
        assert await actions.apply_to_ids(admin, do, [Token(ids[b"a"], dues[b"a"])], act) == {
            ids[b"a"]: FoundIn.SEGMENT
        }
        assert await detail.find_message(admin, Token(ids[b"a"])) is FoundIn.NOWHERE
        assert await actions.apply_to_ids(admin, do, [Token(ids[b"b"], now)], act) == {ids[b"b"]: FoundIn.NOWHERE}
        await admin.execute("UPDATE message SET checksum = checksum + 1")
        damaged = await detail.find_message(admin, Token(ids[b"b"]))
        assert not isinstance(damaged, FoundIn)
        assert not damaged.entry.sound


async def test_only_the_beginning_of_a_large_body_is_read(database: str) -> None:
    async with opened(database) as place, owned(place) as [lane], sql(database) as admin:
        body = bytes(range(256)) * 100
        await place.park(lane, [parcel(place.now_upper_ms() + DAY_MS, body)], [])
        await place.hold(lane, [(parcel(place.now_upper_ms(), body), WHY)])
        for number in (1, 2):
            whole = await detail.find_message(admin, Token(number), len(body))
            part = await detail.find_message(admin, Token(number), len(body) - 1)
            assert not isinstance(whole, FoundIn)
            assert not isinstance(part, FoundIn)
            assert (whole.entry.body, whole.entry.sound) == (body, True)
            assert (part.entry.body, part.entry.sound) == (body[:-1], None)
            assert part.entry._replace(body=body) == whole.entry
            assert "checksum" not in detail.predict(part)


@pytest.mark.parametrize("name", ["all", "route", "header"])
async def test_cancel_all_of_a_filter(database: str, name: str) -> None:
    some, wanted = mixed(actions.PORTION * 2), FILTERS[name]
    meant = set(expected(some, wanted))
    async with store(database, 8) as admin:
        await put(admin, some)
        await compact(admin, START_MS + 4 * DAY_MS, rows=400)
        act = await audit_log.begin(admin, "me", "cancel", wanted.as_dict())
        said: list[int] = []
        pages = actions.waiting_pages(admin, wanted)
        done = await actions.apply_to_matching(admin, actions.cancel, pages, log_id=act, say=said.append)
        assert done.total() == len(meant)
        assert not meant or said[-1] == len(meant)
        assert (await everything(admin)).keys() == {one.id for one in some} - meant
        assert (await conserved(admin))["cancelled"] == len(meant)
        [told] = await audit_log.list_entries(admin, 10)
        assert (told.id, told.who, told.verb, told.messages) == (act, "me", "cancel", len(meant))


@pytest.mark.parametrize("when", [NewDue(at_ms=START_MS + 3 * DAY_MS), NewDue(by_ms=DAY_MS + 5)])
async def test_reschedule_all_of_a_filter(database: str, when: NewDue) -> None:
    """Each message moves once, although the search meets a moved message again."""
    some, wanted = mixed(actions.PORTION * 2), Filter(route=b"a")
    meant = set(expected(some, wanted))
    async with store(database, 8) as admin:
        await put(admin, some)
        before = await everything(admin)
        await compact(admin, START_MS + 4 * DAY_MS, rows=400)
        act = await audit_log.begin(admin, "me", "reschedule", {})
        pages = actions.waiting_pages(admin, wanted)
        done = await actions.apply_to_matching(
            admin, partial(actions.reschedule, when=when), pages, log_id=act, say=lambda _: None
        )
        assert done.total() == len(meant)
        assert set(done) <= {FoundIn.WAITING, FoundIn.SEGMENT}
        assert done[FoundIn.SEGMENT] > 0
        after = await everything(admin)
        for number, one in before.items():
            due_us = when.at_ms * 1000 if when.at_ms is not None else one.due_us + when.by_ms * 1000
            assert after[number] == (one._replace(due_us=due_us) if number in meant else one)
        await conserved(admin)
        [told] = await audit_log.list_entries(admin, 10)
        assert told.messages == len(meant)


async def test_the_audit_trail_by_pages(database: str) -> None:
    async with store(database) as admin:
        for number in range(5):
            await audit_log.begin(admin, "a\0b", f"verb {number}", {"ids": ["x" * 3000]})
        latest = await audit_log.list_entries(admin, 2)
        assert [one.verb for one in latest] == ["verb 4", "verb 3"]
        assert [one.verb for one in await audit_log.list_entries(admin, 9, latest[-1].id)] == [
            "verb 2",
            "verb 1",
            "verb 0",
        ]
        assert Counter(one.who for one in latest) == {"a\N{REPLACEMENT CHARACTER}b": 2}
        assert max(len(one.asked) for one in latest) < 2_100


@pytest.mark.parametrize("lanes", [1, 4])
async def test_no_statement_of_a_list_reads_more_than_a_few_megabytes(
    database: str, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody who may publish can give messages 64 KB of headers, and anybody who may read can search for one."""
    most, huge = 300, 60_000
    monkeypatch.setattr(waiting, "BYTES", 1 << 20)
    monkeypatch.setattr(held_messages, "BYTES", 1 << 20)
    fetched: list[int] = []
    fetch = asyncpg.Connection.fetch

    async def measured(self: asyncpg.Connection, *args: Any, **more: Any) -> list[asyncpg.Record]:
        rows = await fetch(self, *args, **more)
        fetched.append(sum(len(value) for one in rows for value in one if isinstance(value, bytes)))
        return rows

    async with store(database, 2) as admin:
        some = [row(number, START_MS + number // 9, lane=1 + number % lanes) for number in range(1, most + 1)]
        for number in range(20, most):  # No mean size of the first rows foretells those of the rest.
            headers = ((b"padding", text("x" * huge)),)
            props = Props(headers=headers, message_id=b"wanted" if number > most - 30 else None)
            some[number] = some[number]._replace(properties=props.encode())
        await put(admin, some)
        columns = ", ".join(Row._fields).replace("due_us", "due_at").replace("parked_us", "parked_at")
        await admin.execute(
            f"INSERT INTO held ({columns}, retry_at, attempts, kind, reason, may_be_delivered, isolated)"
            f" SELECT {columns}, now(), 1, 'returned', 'why', false, false FROM message"
        )
        monkeypatch.setattr(asyncpg.Connection, "fetch", measured)
        ids = [Filter(message_id=b"wanted"), Filter(message_id=b"missing")]
        for wanted in (Filter(), *ids, Filter(route=b"delayer.in")):
            meant = expected(some, wanted)
            assert await paged(admin, wanted, 1000) == meant
            assert await waiting.count(admin, wanted) == (len(meant), 0)
            assert sorted([id_ async for page in held_messages.pages(admin, wanted) for id_ in page]) == sorted(meant)
            one = await waiting.find(admin, wanted, 1000)
            assert sum(len(entry.properties) for entry in one.messages) < 3 << 20
    assert max(fetched) < (1 << 20) + lanes * 2 * huge
