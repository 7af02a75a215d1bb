"""What a publisher can repeat in 125 kB of headers takes time in proportion to its number, not to the square of it.

Calls and the turns of generators are counted, because a time depends on the machine. What operators do is not: no test
sees a set that is copied for each header."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final

import pytest

from delayer.amqp.errors import MalformedProperties, MalformedTable
from delayer.amqp.properties import Properties, encode_headers, entry, int64, long_string, sized
from delayer.amqp.values import Delivery
from delayer.core.filters import Filter
from delayer.core.message import Parcel, Target
from delayer.format.envelope import InvalidEnvelope, into_cascade, read_envelope
from delayer.format.reading import has_properties, schedule_of
from delayer.format.refusal import EntryPoints, RetryEdits, build_retry, read_refusal, refused_properties
from delayer.format.release import Unpublishable, released_properties
from delayer.intake.handle import classify
from delayer.schedule.schedule import SCHEDULE
from tests.support.fakes import NOW
from tests.unit.intake.test_classify import NAMES, STORE

FEW: Final = 200
MAX: Final = 131_052
VOID: Final = b"V"
ENTRIES: Final = EntryPoints.of("delays", ["orders.in"])

REPEATED: Final = {
    "empty names": lambda n: entry(b"", VOID) * n,
    "different names": lambda n: b"".join(entry(b"%d" % at, VOID) for at in range(n)),
    "delays": lambda n: entry(b"x-delay", int64(5_000)) * n,
    "marks": lambda n: entry(b"x-delay", int64(-5_000)) * n,
    "x-death": lambda n: entry(b"x-death", sized(b"A", b"")) * n,
    "names of dead letters": lambda n: entry(b"x-first-death-queue", VOID) * n,
    "notes of a refusal": lambda n: (
        (entry(b"x-death-", VOID) + entry(b"", VOID) + entry(b"x-delayer-exchange", VOID)) * n
    ),
    "misspelt delays": lambda n: b"".join(entry(b"x-dealy%d" % at, VOID) for at in range(n)),
    "copies": lambda n: b"".join(entry(b"CC", sized(b"A", long_string(b"%d" % at))) for at in range(n)),
    "one long copy": lambda n: entry(b"CC", sized(b"A", b"".join(long_string(b"%d" % at) for at in range(n)))),
    "a long array": lambda n: entry(b"x-delay-key", sized(b"A", VOID * n)),
    "a long table": lambda n: entry(
        b"x-delay-cancel", sized(b"F", b"".join(entry(b"%d" % at, VOID) for at in range(n)))
    ),
}


def _parcel(raw: bytes) -> Parcel:
    return Parcel(NOW, b"orders.in", b"orders.in", b"k", Target(b"orders.out", b"k"), raw, b"body")


def _carried(raw: bytes) -> None:
    sent = into_cascade(_parcel(raw), b"i" * 16, 5, NAMES)
    read_envelope(Properties.parse(sent.properties), sent.body, MAX)


WORK: Final[dict[str, Callable[[bytes], object]]] = {
    "plan": lambda raw: classify(_delivery(raw), STORE, NOW, MAX),
    "release": lambda raw: released_properties(Properties.parse(raw), b"id", NOW, 1 << 30),
    "refuse": lambda raw: refused_properties(_delivery(raw), "why", b"id", MAX),
    "read a refusal": lambda raw: read_refusal(_delivery(raw), ENTRIES),
    "retry a refusal": lambda raw: build_retry(_delivery(raw), ENTRIES, MAX, RetryEdits()),
    "carry in the cascade": _carried,
}


def _delivery(raw: bytes) -> Delivery:
    return Delivery(1, False, b"orders.in", b"k", raw, b"body")


def _steps(work: Callable[[bytes], object], raw: bytes) -> int:
    """How many calls, and turns of generators, this takes."""
    steps = 0

    def count(*_: object) -> None:
        nonlocal steps
        steps += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work(raw)
    except (MalformedTable, MalformedProperties, Unpublishable, InvalidEnvelope):
        pass
    finally:
        sys.setprofile(before)
    return steps


@pytest.mark.parametrize("repeated", REPEATED)
@pytest.mark.parametrize("work", WORK)
def test_work_grows_with_the_number_of_headers(work: str, repeated: str) -> None:
    few, many = (encode_headers(REPEATED[repeated](n)) for n in (FEW, 4 * FEW))
    _steps(WORK[work], few)  # Caches are filled.
    assert _steps(WORK[work], many) <= 5 * _steps(WORK[work], few) + 200


@pytest.mark.parametrize("kind", [b"A", b"F"])
@pytest.mark.parametrize(
    ("name", "look"), [(b"h", lambda raw: has_properties(raw, Filter(headers=((b"h", "x"),)))), (SCHEDULE, schedule_of)]
)
def test_a_look_at_many_messages_decodes_no_nested_value(
    kind: bytes, name: bytes, look: Callable[[bytes], object]
) -> None:
    """A page looks at thousands of messages, and one such value takes up to 0.1 s."""
    inside = VOID if kind == b"A" else entry(b"a", VOID)
    few, many = (encode_headers(entry(name, sized(kind, inside * n))) for n in (1, 10_000))
    assert not look(many)
    assert _steps(look, many) == _steps(look, few)
