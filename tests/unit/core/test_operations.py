"""Any sequence of operations, cut into batches anywhere, has the result that it has one by one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise

from hypothesis import given
from hypothesis import strategies as st

from delayer.core.message import REPLACE, KeyGroup, KeyMode, Parcel
from delayer.core.operations import Cancel, Operation, fold
from tests.support.store import parcel


@dataclass
class Waiting:
    """A store as a list: the waiting messages in order of arrival, and the fate of the rest. ``since_ms`` of a message
    is the start of its burst; None if it is held."""

    messages: list[Parcel] = field(default_factory=list)
    cancelled: list[bytes] = field(default_factory=list)
    parked: int = 0
    met: list[int] = field(default_factory=list)
    """The places of the cancels that met a message, among all operations."""

    def delete(self, keys: Iterable[bytes] = (), group: KeyGroup | None = None) -> set[bytes]:
        """Cancel the messages of these keys, and those of the group. Returns their keys."""
        named = set(keys)
        out = [
            one
            for one in self.messages
            if one.key is not None and (one.key in named or (group is not None and one.key.startswith(group)))
        ]
        self.messages = [one for one in self.messages if one not in out]
        self.cancelled += [one.body for one in out]
        return {one.key for one in out if one.key is not None}

    def park(self, messages: Iterable[Parcel], now_ms: int) -> None:
        for one in messages:
            self.messages.append(one._replace(since_ms=now_ms if one.since_ms is None else one.since_ms))
            self.parked += 1

    def under(self, key: bytes | None) -> Parcel | None:
        return next((one for one in self.messages if key is not None and one.key == key), None)

    def outcome(self) -> tuple[object, ...]:
        return self.messages, sorted(self.cancelled), self.parked, sorted(self.met)


def one_by_one(store: Waiting, operations: Sequence[Operation], first: int, now_ms: int) -> None:
    for at, operation in enumerate(operations, first):
        if isinstance(operation, Parcel):
            there, ceiling_ms = store.under(operation.key), operation.mode.ceiling_ms
            if operation.mode.keep and there is not None:
                store.parked += 1
                store.cancelled.append(operation.body)
                continue
            if ceiling_ms is not None:
                since_ms = now_ms if there is None or there.since_ms is None else there.since_ms
                due_ms = min(operation.due_ms, max(now_ms, since_ms + ceiling_ms))
                operation = operation._replace(due_ms=due_ms, since_ms=since_ms)  # noqa: PLW2901 - as decided
            store.delete([] if operation.key is None else [operation.key])
            store.park([operation], now_ms)
        elif isinstance(operation.key, KeyGroup):
            store.delete(group=operation.key)
        elif store.delete([operation.key]):
            store.met.append(at)


def folded(store: Waiting, batch: Sequence[Operation], first: int, now_ms: int) -> None:
    """Apply a batch as a store does. ``first``: the position of its first operation among all."""
    left = fold(batch)
    waited = {one.key: one.since_ms for one in store.messages if one.key is not None}
    deleted = store.delete(left.keys - left.yielding)
    for group in left.groups:
        deleted |= store.delete(group=group)
    left = left.settle(waited, now_ms)
    store.park(left.kept, now_ms)
    store.parked += len(left.dropped)
    store.cancelled += [one.body for one in left.dropped]
    store.met += [first + at for at in left.applied(deleted).cancelled]


KEYS = [b"a", b"ab", b"abc", b"b", b"\xff", b"\xff\xff"]
"""Some are prefixes of others, so that groups have several keys, and share some."""
MODES = [REPLACE, KeyMode(keep=True), KeyMode(ceiling_ms=1_500), KeyMode(ceiling_ms=4_000)]
OPERATIONS = st.one_of(
    st.integers(0, 20_000).map(parcel),
    st.builds(
        lambda key, mode, due_ms: parcel(due_ms, key=key, mode=mode),
        st.sampled_from(KEYS),
        st.sampled_from(MODES),
        st.integers(0, 20_000),
    ),
    st.sampled_from(KEYS).map(Cancel),
    st.sampled_from([b"a", b"ab", b"b", b"\xff"]).map(lambda group: Cancel(KeyGroup(group))),
)


def numbered(operations: Sequence[Operation]) -> list[Operation]:
    """The same operations, with a distinct body per message."""
    return [one._replace(body=b"%d" % at) if isinstance(one, Parcel) else one for at, one in enumerate(operations)]


@given(
    st.dictionaries(st.sampled_from(KEYS), st.none() | st.integers(-5_000, 0)),
    st.lists(OPERATIONS, max_size=40).map(numbered),
    st.lists(st.integers(0, 40), max_size=6),
)
def test_batches_have_the_result_of_one_operation_after_another(
    before: dict[bytes, int | None], operations: list[Operation], cuts: list[int]
) -> None:
    """A second passes between two batches."""
    there = [parcel(0, b"waits", key=key, since_ms=since_ms) for key, since_ms in sorted(before.items())]
    expected, found = Waiting([*there]), Waiting([*there])
    edges = [0, *sorted(min(cut, len(operations)) for cut in cuts), len(operations)]
    for now_ms, (first, after) in zip(count(0, 1_000), pairwise(edges), strict=False):
        one_by_one(expected, operations[first:after], first, now_ms)
        folded(found, operations[first:after], first, now_ms)
    assert found.outcome() == expected.outcome()


def test_only_the_last_operation_of_a_key_is_left() -> None:
    """A batch of replacements of one key costs the store one message."""
    count = 2_000
    left = fold([parcel(0, b"%d" % n, key=b"k") for n in range(count)])
    assert [one.body for one in left.kept] == [b"%d" % (count - 1)]
    assert (len(left.dropped), left.keys, left.groups) == (count - 1, {b"k"}, [])
