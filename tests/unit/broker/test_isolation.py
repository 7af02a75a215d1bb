"""The search for the message or destination at fault: each state, what a round shows, and the next state."""

from __future__ import annotations

import pytest

from delayer.amqp.errors import ChannelClosed, ConfirmTimeout, ConnectionLost
from delayer.broker.circuit_breaker import Destination
from delayer.broker.isolation import SMALL_PORTION, FaultSearch, Suspicion

A, B = Destination(b"a", b"k"), Destination(b"b", b"k")
NONE, BOTH = frozenset[Destination](), frozenset({A, B})
CLOSED = ChannelClosed(404, "no exchange")
SILENT = ConfirmTimeout(0, "no confirm")
ENDED = ConnectionLost(541, "INTERNAL_ERROR")
DESTINATION, ONE, ALL = Suspicion


@pytest.mark.parametrize(
    ("suspicion", "search", "is_exclusive"),
    [
        (DESTINATION, FaultSearch(DESTINATION, SMALL_PORTION, NONE), False),
        (ONE, FaultSearch(ONE, SMALL_PORTION, None), True),
        (ALL, FaultSearch(ALL, 1, None), True),
    ],
)
def test_the_suspicion_decides_the_first_round(suspicion: Suspicion, search: FaultSearch, is_exclusive: bool) -> None:
    assert FaultSearch.begin(suspicion) == search
    assert search.is_exclusive == is_exclusive


@pytest.mark.parametrize(
    ("before", "lost", "after"),
    [
        (FaultSearch(DESTINATION, 8, NONE), None, FaultSearch(DESTINATION, 8, BOTH)),
        (FaultSearch(DESTINATION, 64, NONE), None, FaultSearch(DESTINATION, 8, BOTH)),
        (FaultSearch(DESTINATION, 8, NONE), ENDED, FaultSearch(ONE, 8, None)),
        (FaultSearch(ONE, 8, NONE), None, FaultSearch(ONE, 8, BOTH)),
        (FaultSearch(ONE, 8, NONE), ENDED, FaultSearch(ONE, 1, None)),
        (FaultSearch(ALL, 1, NONE), ENDED, FaultSearch(ALL, 1, None)),
    ],
)
def test_after_probes(before: FaultSearch, lost: ConnectionLost | None, after: FaultSearch) -> None:
    assert before.after_probes([A, B], lost) == after


@pytest.mark.parametrize(
    ("before", "sent", "lost", "found", "after"),
    [
        # A portion grows, within bounds.
        (FaultSearch(DESTINATION, 8, BOTH), 8, None, False, FaultSearch(DESTINATION, 16, None)),
        (FaultSearch(DESTINATION, 64, BOTH), 64, None, False, FaultSearch(DESTINATION, 100, None)),
        (FaultSearch(ONE, 1, None), 1, None, False, FaultSearch(ONE, 2, None)),
        (FaultSearch(ONE, 8, None), 8, None, False, FaultSearch(ONE, 8, None)),
        # The broker closed the channel for a message of the portion.
        (FaultSearch(DESTINATION, 8, BOTH), 8, CLOSED, False, FaultSearch(DESTINATION, 1, None)),
        (FaultSearch(DESTINATION, 1, BOTH), 1, CLOSED, True, FaultSearch(DESTINATION, 1, None)),
        (FaultSearch(DESTINATION, 8, BOTH), 1, CLOSED, True, FaultSearch(DESTINATION, 8, None)),
        (FaultSearch(ONE, 8, None), 2, CLOSED, False, FaultSearch(ONE, 1, None)),
        (FaultSearch(ONE, 1, None), 1, CLOSED, True, FaultSearch(ONE, 1, None)),
        # It closed the connection. A connection shared by rounds proves nothing.
        (FaultSearch(DESTINATION, 8, BOTH), 8, ENDED, False, FaultSearch(ONE, 8, None)),
        (FaultSearch(DESTINATION, 1, BOTH), 1, ENDED, False, FaultSearch(ONE, 8, None)),
        (FaultSearch(ONE, 8, None), 8, ENDED, False, FaultSearch(ONE, 1, None)),
        (FaultSearch(ONE, 1, None), 1, ENDED, True, FaultSearch(ONE, 1, None)),
        (FaultSearch(ALL, 1, None), 1, ENDED, True, FaultSearch(ALL, 1, None)),
        # A destination is silent: probe all of them again.
        (FaultSearch(DESTINATION, 8, BOTH), 8, SILENT, False, FaultSearch(DESTINATION, 8, NONE)),
        (FaultSearch(DESTINATION, 1, None), 1, SILENT, False, FaultSearch(DESTINATION, 1, NONE)),
        (FaultSearch(ALL, 1, None), 1, SILENT, False, FaultSearch(ALL, 1, NONE)),
    ],
)
def test_after_a_portion(
    before: FaultSearch, sent: int, lost: ChannelClosed | ConnectionLost | None, found: bool, after: FaultSearch
) -> None:
    assert before.has_found(sent, lost) == found
    assert before.after_portion(sent, lost, is_all_probed=True, batch_size=100) == after


def test_probes_continue_until_every_destination_is_probed() -> None:
    """The messages of answered destinations go first, then the largest group."""
    groups = {A: [0, 3], B: [1], Destination(b"c", b"k"): [2, 4, 5]}
    search = FaultSearch.begin(DESTINATION)
    assert search.split(groups) == ([Destination(b"c", b"k"), A, B], [])
    search = search.after_probes([A, B], None)
    assert search.split(groups) == ([Destination(b"c", b"k")], [0, 1, 3])
    assert search.after_portion(3, None, is_all_probed=False, batch_size=100).probed == BOTH
