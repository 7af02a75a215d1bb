"""The arguments of every section: the options, the servers, and the result for its figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

from bench import rows
from bench.figures import Figure, Result
from bench.servers import Place, Servers

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Options:
    """The sizes of a run. The defaults are those of the full run; :func:`quick` returns those of the quick run."""

    quick: bool = False
    count: int = 200_000
    sizes: tuple[int, ...] = (512, 4096)
    backlog: int = 10_000_000
    repeats: int = 3
    rates: tuple[int, ...] = (2000, 5000)
    longest_delay: int = 30
    steady_seconds: int = 60
    burst: int = 100_000
    flood: int = 60_000
    waiting: int = 1_000_000
    """Messages waiting in RabbitMQ 4.4 during a burst."""
    native: int = 100_000
    trip_seconds: int = 20
    trip_longest: int = 7
    peers: int = 20_000
    plugin_url: str = ""
    churn_seconds: int = 600
    churn_rate: int = 5000
    schedules: int = 10_000
    schedule_period: int = 60
    """Seconds: a divisor of a minute."""
    schedule_seconds: int = 600
    many_schedules: int = 1_000_000
    hours_seconds: int = 10_800
    """Seconds of publishing. The first ``hours_longest`` of them are the warm-up; as long again, the rest drains."""
    hours_longest: int = 3600
    hours_rate: int = 1000
    hours_schedules: int = 1000
    hours_step: int = 60
    stall_seconds: int = 3600
    stall_rates: tuple[int, ...] = (200, 2000)
    patience: int = 60
    """Seconds without a message after which a consumer of hours or stalls ends."""

    def count_of(self, size: int) -> int:
        """The count for this size: fewer large messages, so that a section takes about as long for every size."""
        return thousands(self.count if size <= 1024 else self.count // 2)


def quick() -> Options:
    """One turn of each section that needs only seconds: it shows that the bench works, and gives rough figures."""
    return Options(
        quick=True, count=10_000, sizes=(512,), backlog=20_000, repeats=1, rates=(2000,), longest_delay=2,
        steady_seconds=3, burst=5_000, flood=3_000, waiting=10_000, native=6_000, trip_seconds=2,
        trip_longest=2, peers=1000, churn_seconds=5, churn_rate=1000, schedules=200,
        schedule_period=5, schedule_seconds=5, many_schedules=2_000, hours_seconds=10, hours_longest=3,
        hours_rate=300, hours_schedules=50, hours_step=1, stall_seconds=3, stall_rates=(200,), patience=5,
    )  # fmt: skip


def thousands(count: int) -> int:
    return max(-(-count // 1000), 1) * 1000


class Measured(NamedTuple):
    """The place of a measurement, and the number of rows waiting there in addition to the measured ones."""

    place: Place
    backlog: int


@dataclass
class Bench:
    """One run."""

    options: Options
    servers: Servers
    result: Result = field(default_factory=Result)
    progress: Callable[[str], None] = print
    section: str = ""
    folder: Path = RESULTS
    _backlogged: str | None = None

    def say(self, text: str) -> None:
        self.progress(f"{self.section}: {text}")

    def add(self, what: str, value: float, unit: str, **at: int) -> Figure:
        figure = Figure(self.section, what, rounded(value), unit, at)
        self.result.figures.append(figure)
        return figure

    def note(self, text: str) -> None:
        self.result.notes.append(f"{self.section}: {text}")

    @property
    def lines(self) -> Path:
        """The file of JSON lines that a long section writes next to the result."""
        return self.folder / f"{'quick-' if self.options.quick else ''}{self.section}.jsonl"

    @contextmanager
    def writing_lines(self) -> Iterator[IO[str]]:
        """A new file of lines, which replaces the last run's only when the run is complete."""
        self.lines.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.lines.with_name(f".{self.lines.name}")
        with unfinished.open("w") as file:
            yield file
        unfinished.replace(self.lines)

    @property
    def backlogs(self) -> tuple[int, ...]:
        return (0, self.options.backlog) if self.options.backlog else (0,)

    @property
    def loads(self) -> list[tuple[int, int]]:
        """Backlog and size of each park and release: all pairs; a quick run has the backlog for one size only."""
        pairs = [(backlog, size) for backlog in self.backlogs for size in self.options.sizes]
        return [pair for pair in pairs if not (self.options.quick and all(pair) and pair[1] != self.options.sizes[0])]

    async def place(self, backlog: int = 0) -> Place:
        """An empty store, or one with this many waiting rows, which is filled once and kept."""
        if not backlog:
            return await self.servers.place()
        if self._backlogged is None:
            place = await self.servers.place()
            await rows.put_backlog(place.store_url, backlog, 512, self.say)
            self._backlogged = place.store_url.rpartition("/")[2]
        return await self.servers.place(database=self._backlogged)


def rounded(value: float) -> float:
    """Round to four digits: no figure here is more precise."""
    return float(f"{value:.4g}") if abs(value) < 1000 else float(round(value))
