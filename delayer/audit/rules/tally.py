"""The one aggregate of all rules: how many messages of what size and due when, under a key. Pure.

A rule that looks at rows names keys for each of them; the tallies under equal keys are combined, in any order and
grouping (it is a commutative monoid), so it does not matter where and in how many portions the rows were counted. That
is what makes the same functions good for a list of rows and for a cluster.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import reduce
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from delayer.audit.rules.message import EXAMPLES


class Key(NamedTuple):
    """``kind`` says what the other three are; see :mod:`delayer.audit.rules.counting`."""

    kind: str
    number: int = 0
    first: bytes = b""
    second: bytes = b""


class Tally(NamedTuple):
    """``messages`` of ``size`` bytes together, due from ``first_due_ms`` to ``last_due_ms``. ``examples``: the lowest
    ids, sorted, at most EXAMPLES, where the kind asks for them."""

    messages: int
    size: int
    first_due_ms: int
    last_due_ms: int
    examples: tuple[int, ...] = ()


Partial = tuple[Key, Tally]


def combined(one: Tally, other: Tally) -> Tally:
    examples = one.examples
    if other.examples and other.examples != examples:
        examples = tuple(sorted({*examples, *other.examples})[:EXAMPLES])
    return Tally(
        one.messages + other.messages,
        one.size + other.size,
        min(one.first_due_ms, other.first_due_ms),
        max(one.last_due_ms, other.last_due_ms),
        examples,
    )


def folded(partials: Iterable[Partial]) -> Iterator[Partial]:
    """One partial for each key of ``partials``, which must be sorted by key. Holds one key at a time."""
    for key, group in groupby(partials, itemgetter(0)):
        yield key, reduce(combined, map(itemgetter(1), group))


class Tallies:
    """A dictionary of tallies that is emptied before it grows beyond ``bound`` keys.

    Keys are plain tuples and tallies lists while they are in here: half of the audit's Python time is spent in
    :meth:`add`, and named tuples would double it.
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._found: dict[tuple[str, int, bytes, bytes], list[int]] = {}
        self._examples: dict[tuple[str, int, bytes, bytes], set[int]] = {}

    @property
    def full(self) -> bool:
        return len(self._found) >= self._bound

    def add(self, key: tuple[str, int, bytes, bytes], size: int, due_ms: int) -> None:
        """Count one message."""
        tally = self._found.get(key)
        if tally is None:
            self._found[key] = [1, size, due_ms, due_ms]
            return
        tally[0] += 1
        tally[1] += size
        if due_ms < tally[2]:
            tally[2] = due_ms
        elif due_ms > tally[3]:
            tally[3] = due_ms

    def name(self, key: tuple[str, int, bytes, bytes], example: int) -> None:
        """Make ``example`` one of the key's, unless there are lower ones enough."""
        examples = self._examples.setdefault(key, set())
        examples.add(example)
        if len(examples) > EXAMPLES:
            examples.remove(max(examples))

    def drain(self) -> Iterator[Partial]:
        found, examples = self._found, self._examples
        self._found, self._examples = {}, {}
        for key, tally in found.items():
            messages, size, first_due_ms, last_due_ms = tally
            named = tuple(sorted(examples.get(key, ())))
            yield Key(*key), Tally(messages, size, first_due_ms, last_due_ms, named)
