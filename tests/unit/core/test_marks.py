"""Which messages loop."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from delayer.core.marks import LoopWatch

ROUTE = b"orders.in"


def loop(watch: LoopWatch, every_ms: int, message: bytes = b"a", start_ms: int = 0) -> Iterator[bool]:
    """The watch's verdict at each return of a message due immediately that returns after ``every_ms``."""
    for now_ms in range(start_ms + every_ms, start_ms + 30_000, every_ms):
        yield watch.returned(ROUTE, message, now_ms, now_ms)


@pytest.mark.parametrize(("every_ms", "reported"), [(1, 1), (90, 1), (100, 0), (500, 0), (1_500, 0)])
def test_a_message_loops_at_more_than_ten_returns_a_second(every_ms: int, reported: int) -> None:
    assert sum(loop(LoopWatch(), every_ms)) == reported


def test_it_is_reported_after_ten_seconds() -> None:
    said = list(loop(LoopWatch(), 10))
    assert 1_000 <= said.index(True) <= 1_002


def test_many_messages_that_return_once_each_are_not_a_loop() -> None:
    watch = LoopWatch()
    assert not any(watch.returned(ROUTE, b"%d" % now_ms, now_ms, now_ms) for now_ms in range(30_000))


def test_many_messages_that_return_once_each_do_not_hide_a_loop() -> None:
    watch = LoopWatch()
    said = 0
    for now_ms, looping in zip(range(10, 30_000, 10), loop(watch, 10), strict=False):
        said += looping
        said += watch.returned(ROUTE, b"%d" % now_ms, now_ms, now_ms)
    assert said == 1


def test_a_message_that_left_its_loop_makes_room_for_another() -> None:
    watch = LoopWatch()
    watch.returned(ROUTE, b"gone", 10, 10)
    assert sum(loop(watch, 10, b"other", start_ms=20)) == 1


def test_a_message_that_waits_does_not_hide_a_loop() -> None:
    watch = LoopWatch()
    assert not watch.returned(ROUTE, b"later", 30 * 86_400_000, 10)
    assert sum(loop(watch, 10, start_ms=20)) == 1


def test_each_route_is_reported() -> None:
    watch = LoopWatch()
    assert sum(loop(watch, 10)) == 1
    assert sum(loop(watch, 10, b"b", start_ms=60_000)) == 0
    assert sum(watch.returned(b"other", b"a", now_ms, now_ms) for now_ms in range(0, 30_000, 5)) == 1


def test_a_loop_over_two_routes_is_reported_for_each() -> None:
    watch = LoopWatch()
    said = [route for at in range(0, 30_000, 20) for route in (b"a", b"b") if watch.returned(route, b"x", at, at)]
    assert said == [b"a", b"b"]
