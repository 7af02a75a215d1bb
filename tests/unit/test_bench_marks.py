"""Which message came, and which did not: a loss must not hide behind a repeat."""

from __future__ import annotations

import socket
import threading
from itertools import islice
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bench import marks, traffic
from bench.plain import Plain, portions
from bench.run import Bench, Options
from bench.servers import Servers
from bench.steady import Steady, report


def wire(numbers: list[int], due_ms: int = 1_900_000_000_000) -> bytes:
    """What a broker would send, as far as the reader looks."""
    return b"".join(bytes(marks.message("in", "key", marks.due_at(due_ms + n, n), b"x" * 20)) for n in numbers)


def test_a_chunk_is_written_again_with_other_instants_and_numbers() -> None:
    chunk = marks.Chunk("in", "key", b"x" * 50, 3)
    for first in (0, 3, 300):
        found = [
            tuple(int.from_bytes(one, "big") for one in match.groups())
            for match in marks.NUMBERED.finditer(chunk.fill([10, 20, 30], first))
        ]
        assert found == [(10, first), (20, first + 1), (30, first + 2)]
    with pytest.raises(ValueError, match="placeholder"):
        marks.Chunk("in", "key", marks.instant(marks.PLACE_OF_NUMBER), 3)


def test_a_repeat_does_not_stand_in_for_a_loss() -> None:
    tally = marks.Tally(4, 4)
    for n in (0, 1, 1, 3):
        tally.take(n)
    assert (tally.came, tally.repeated) == (3, 1)
    tally.take(7)  # more than were announced
    tally.take(7)
    assert (tally.came, tally.repeated) == (4, 2)


def test_numbers_that_are_gone_round_in() -> None:
    tally = marks.Tally(5, 2)  # 0, 1, 0, 1, 0
    for n in (0, 0, 0, 0, 1):
        tally.take(n)
    assert (tally.came, tally.repeated) == (4, 1)


@pytest.mark.parametrize(
    ("count", "size", "each", "expected"),
    [(100_000, 512, 250, 100_000), (1001, 512, 250, 1250), (1000, 1_000_000, 1, 64), (50, 1_000_000, 1, 50)],
)
def test_how_many_of_a_flood_differ(count: int, size: int, each: int, expected: int) -> None:
    assert marks.distinct(count, size, each) == expected
    assert len(list(islice(portions([b"x"] * expected, each), expected))) == expected // each


class Reader:
    """Stands in for a connection: a socket, and what was acknowledged."""

    def __init__(self, data: bytes, piece: int) -> None:
        self.socket, self._other = socket.socketpair()
        self.acknowledged = 0
        self._pieces = [data[at : at + piece] for at in range(0, len(data), piece)]
        self._sending = threading.Thread(target=self._send)

    def _send(self) -> None:
        for piece in self._pieces:
            self._other.sendall(piece)

    def acknowledge(self, tag: int) -> None:
        self.acknowledged = tag

    def __enter__(self) -> Reader:
        self._sending.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._sending.join()
        self.socket.close()
        self._other.close()


@pytest.mark.parametrize("piece", [1, 7, 35, 36, 37, 100_000])
def test_the_reader_waits_for_each_number(piece: int) -> None:
    tally = marks.Tally(3, 3)
    with Reader(wire([0, 1, 1, 2]), piece) as reader:
        seen = traffic._read(cast(Plain, reader), 3, 5.0, tally)
    assert (len(seen.at), tally.came, tally.repeated, reader.acknowledged) == (4, 3, 1, 4)


def test_a_message_that_does_not_come_is_missed() -> None:
    tally = marks.Tally(3, 3)
    with Reader(wire([0, 1, 1]), 1000) as reader:
        assert len(traffic._read(cast(Plain, reader), 3, 0.05, tally).at) == 3
    assert 3 - tally.came == 1


def steady(p99_ms: float, *, came: int = 100, repeated: int = 0) -> Steady:
    late = {"0.5": p99_ms / 10, "0.99": p99_ms, "0.999": p99_ms * 2, "1.0": p99_ms * 3}
    seen: dict[str, Any] = {"late": late, "early": 0, "came": came, "repeated": repeated, "by_second": [(0, p99_ms, 1)]}
    return Steady(100, seen, {"behind_ms": p99_ms}, {"daemon": p99_ms}, p99_ms)


def test_turns_are_told_by_their_medians_and_what_must_not_be_by_the_worst() -> None:
    bench = Bench(Options(), cast(Servers, SimpleNamespace()), section="steady")
    report(bench, [steady(30), steady(10, came=98, repeated=2), steady(20_000)], rate=5000, backlog=0)
    told = {figure.what: figure.value for figure in bench.result.figures}
    assert (told["lateness p50"], told["lateness p99"], told["lateness max"]) == (3, 30, 90)
    assert (told["early"], told["missing"], told["repeated"]) == (0, 2, 2)
    assert (told["CPU of daemon"], told["memory of daemon"]) == (30, 20_000)
    assert bench.result.series[0].y == [3, 30, 60, 90]
    assert bench.result.notes[0].startswith("steady: 5,000/s, 0 waiting: more came in than went out")
