"""The law of each key mode, for one key: its messages are sent, cancelled and released in any order and any batches."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from delayer.core.message import KeyMode
from delayer.core.operations import Cancel, Operation
from tests.support.store import parcel
from tests.unit.core.test_operations import Waiting, folded

KEY = b"k"
CEILING_MS = 1_000
Batch = tuple[int, bool, Sequence[int | None]]
"""Milliseconds since the batch before; whether the waiting message is released first, if it is due; and the operations:
a message with this delay in milliseconds, or a cancel."""
BATCHES = st.lists(
    st.tuples(st.integers(0, 600), st.booleans(), st.lists(st.none() | st.integers(0, 3_000), max_size=4)), max_size=20
)


def operations_of(batch: Sequence[int | None], first: int, now_ms: int, mode: KeyMode) -> list[Operation]:
    return [
        Cancel(KEY) if delay_ms is None else parcel(now_ms + delay_ms, b"%d" % at, key=KEY, mode=mode)
        for at, delay_ms in enumerate(batch, first)
    ]


@given(BATCHES)
def test_keep_delivers_the_first_message_and_drops_those_that_come_while_it_waits(batches: list[Batch]) -> None:
    store, now_ms, sent = Waiting(), 0, 0
    first: bytes | None = None
    for pause_ms, releases, batch in batches:
        now_ms += pause_ms
        if releases and store.messages:
            assert [one.body for one in store.messages] == [first]
            store.messages, first = [], None
        operations = operations_of(batch, sent, now_ms, KeyMode(keep=True))
        folded(store, operations, sent, now_ms)
        sent += len(batch)
        for operation in operations:
            first = None if isinstance(operation, Cancel) else first or operation.body
        assert [one.body for one in store.messages] == ([] if first is None else [first])
    assert store.parked == sum(delay_ms is not None for _, _, batch in batches for delay_ms in batch)


@given(BATCHES)
def test_debounce_delivers_the_newest_message_within_the_ceiling_of_the_first(batches: list[Batch]) -> None:
    store, now_ms, sent = Waiting(), 0, 0
    burst: list[tuple[bytes, int]] = []
    """The messages since the last one was released or cancelled, each with the due instant that the law gives it."""
    first_ms = 0
    for pause_ms, releases, batch in batches:
        now_ms += pause_ms
        if releases and store.messages and store.messages[0].due_ms <= now_ms:
            store.messages, burst = [], []
        operations = operations_of(batch, sent, now_ms, KeyMode(ceiling_ms=CEILING_MS))
        folded(store, operations, sent, now_ms)
        sent += len(batch)
        for operation in operations:
            if isinstance(operation, Cancel):
                burst = []
                continue
            first_ms = first_ms if burst else now_ms
            burst.append((operation.body, min(operation.due_ms, max(first_ms + CEILING_MS, now_ms))))
        assert [(one.body, one.due_ms) for one in store.messages] == burst[-1:]


@given(st.lists(st.tuples(st.integers(1, 400), st.integers(1, 3_000)), min_size=1, max_size=60))
def test_a_stream_that_debounces_never_starves(messages: list[tuple[int, int]]) -> None:
    """Each comes before the last one is due, or not. One is due within the ceiling of the first, however many come."""
    store, now_ms = Waiting(), 0
    first_ms = 0
    for at, (pause_ms, delay_ms) in enumerate(messages):
        now_ms += pause_ms
        if store.messages and store.messages[0].due_ms <= now_ms:
            assert store.messages.pop().due_ms <= first_ms + CEILING_MS
        first_ms = first_ms if store.messages else now_ms
        assert now_ms <= first_ms + CEILING_MS
        folded(store, operations_of([delay_ms], at, now_ms, KeyMode(ceiling_ms=CEILING_MS)), at, now_ms)


def test_a_burst_that_outlived_its_ceiling_is_due_now_and_not_late() -> None:
    """As after an hour without a database, or with a lower ceiling than that of the first message."""
    store = Waiting([parcel(10_000, key=KEY, since_ms=0)])
    folded(store, [parcel(99_000, b"new", key=KEY, mode=KeyMode(ceiling_ms=500))], 0, 8_000)
    assert [(one.body, one.due_ms, one.since_ms) for one in store.messages] == [(b"new", 8_000, 0)]
    folded(store, [parcel(7_000, b"past", key=KEY, mode=KeyMode(ceiling_ms=500))], 1, 8_000)
    assert [(one.body, one.due_ms) for one in store.messages] == [(b"past", 7_000)]


def test_a_held_message_ends_its_burst_and_still_keeps_its_key() -> None:
    held = parcel(5_000, b"held", key=KEY)
    store = Waiting([held])
    folded(store, [parcel(99_000, b"dropped", key=KEY, mode=KeyMode(keep=True))], 0, 90_000)
    assert (store.messages, store.cancelled, store.parked) == ([held], [b"dropped"], 1)
    folded(store, [parcel(99_000, b"new", key=KEY, mode=KeyMode(ceiling_ms=CEILING_MS))], 1, 90_000)
    assert [(one.body, one.due_ms, one.since_ms) for one in store.messages] == [(b"new", 91_000, 90_000)]
