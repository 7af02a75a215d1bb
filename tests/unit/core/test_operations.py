"""Any sequence of operations, cut into batches anywhere, has the result that it has one by one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from delayer.core.message import KeyGroup, Parcel
from delayer.core.operations import Cancel, Operation, fold
from tests.support.store import parcel


@dataclass
class Waiting:
    """A store as a list: the waiting messages in order of arrival, and the fate of the rest."""

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

    def park(self, messages: Sequence[Parcel]) -> None:
        self.messages += messages
        self.parked += len(messages)

    def outcome(self) -> tuple[object, ...]:
        return self.messages, sorted(self.cancelled), self.parked, sorted(self.met)


def one_by_one(store: Waiting, operations: Sequence[Operation]) -> None:
    for at, operation in enumerate(operations):
        if isinstance(operation, Parcel):
            store.delete([] if operation.key is None else [operation.key])
            store.park([operation])
        elif isinstance(operation.key, KeyGroup):
            store.delete(group=operation.key)
        elif store.delete([operation.key]):
            store.met.append(at)


def folded(store: Waiting, batch: Sequence[Operation], first: int) -> None:
    """Apply a batch as a store does. ``first``: the position of its first operation among all."""
    left = fold(batch)
    deleted = store.delete(left.keys)
    for group in left.groups:
        deleted |= store.delete(group=group)
    store.park(left.kept)
    store.parked += len(left.dropped)
    store.cancelled += [one.body for one in left.dropped]
    store.met += [first + at for at in left.applied(deleted).cancelled]


KEYS = [b"a", b"ab", b"abc", b"b", b"\xff", b"\xff\xff"]
"""Some are prefixes of others, so that groups have several keys, and share some."""
OPERATIONS = st.one_of(
    st.sampled_from([None, *KEYS]).map(lambda key: parcel(0, key=key)),
    st.sampled_from(KEYS).map(Cancel),
    st.sampled_from([b"a", b"ab", b"b", b"\xff"]).map(lambda group: Cancel(KeyGroup(group))),
)


def numbered(operations: Sequence[Operation]) -> list[Operation]:
    """The same operations, with a distinct body per message."""
    return [one._replace(body=b"%d" % at) if isinstance(one, Parcel) else one for at, one in enumerate(operations)]


@given(
    st.sets(st.sampled_from(KEYS)),
    st.lists(OPERATIONS, max_size=40).map(numbered),
    st.lists(st.integers(0, 40), max_size=6),
)
def test_batches_have_the_result_of_one_operation_after_another(
    before: set[bytes], operations: list[Operation], cuts: list[int]
) -> None:
    there = [parcel(0, b"waits", key=key) for key in sorted(before)]
    expected, found = Waiting([*there]), Waiting([*there])
    one_by_one(expected, operations)
    edges = [0, *sorted(min(cut, len(operations)) for cut in cuts), len(operations)]
    for first, after in pairwise(edges):
        folded(found, operations[first:after], first)
    assert found.outcome() == expected.outcome()


def test_only_the_last_operation_of_a_key_is_left() -> None:
    """A batch of replacements of one key costs the store one message."""
    count = 2_000
    left = fold([parcel(0, b"%d" % n, key=b"k") for n in range(count)])
    assert [one.body for one in left.kept] == [b"%d" % (count - 1)]
    assert (len(left.dropped), left.keys, left.groups) == (count - 1, {b"k"}, [])
