"""What the demo sent and what came back, and whether that is what was promised."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import aio_pika
from aio_pika.abc import AbstractIncomingMessage
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

KEPT = ("message_id", "correlation_id", "content_type", "type", "priority", "delivery_mode")


@dataclass(frozen=True)
class Expected:
    """A message that was sent. ``due_ms``: not before this instant, by the sender's reading before it published."""

    number: int
    mode: str
    route: str
    queue: str
    seconds: float
    due_ms: float
    routing_key: str
    message: aio_pika.Message


@dataclass(frozen=True)
class Arrival:
    """One coming back. ``late_ms`` counts from ``due_ms``; ``flaw`` says what is wrong with it, or nothing."""

    expected: Expected
    late_ms: float
    flaw: str


@dataclass
class Ledger:
    expected: list[Expected] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)
    strange: list[str] = field(default_factory=list)
    on_arrival: Callable[[Arrival], None] = lambda _: None
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def sent(self, expected: Expected) -> None:
        self.expected.append(expected)

    def count(self) -> int:
        """Different messages that came back."""
        return len({arrival.expected.number for arrival in self.arrivals})

    def arrived(self, queue: str, message: AbstractIncomingMessage, at_ms: float) -> None:
        number = message.headers.get("demo")
        if not isinstance(number, int) or not 0 <= number < len(self.expected):
            self.strange.append(f"{queue}: {message.message_id}")
            return
        expected = self.expected[number]
        late_ms = at_ms - expected.due_ms
        arrival = Arrival(expected, late_ms, _flaw(expected, queue, message, late_ms))
        self.arrivals.append(arrival)
        self.on_arrival(arrival)
        self._news.set()

    async def until(self, done: Callable[[], bool], timeout: float = 30.0) -> None:
        """Wait until ``done``; at the timeout go on with what is there, the report will say what is missing."""
        try:
            async with asyncio.timeout(timeout):
                while not done():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            return

    def report(self, console: Console, seconds: float) -> int:
        """Print the summary; the exit code."""
        table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
        for heading in ("mode", "sent", "back", "missing", "twice", "early", "changed", "late p50", "max"):
            table.add_column(heading, justify="left" if heading == "mode" else "right")
        for mode in dict.fromkeys(one.mode for one in self.expected):
            table.add_row(mode, *self._row(mode))
        console.print(table)
        console.print("[dim]late: ms after the due instant; the cascade of native mode counts in whole seconds.[/]")
        flaws = [f"message {one.expected.number}: {one.flaw}" for one in self.arrivals if one.flaw]
        flaws += [f"not ours: {one}" for one in self.strange]
        counts = [sum(one.expected.number == sent.number for one in self.arrivals) for sent in self.expected]
        flaws += [f"message {number} came back {count} times" for number, count in enumerate(counts) if count != 1]
        for flaw in flaws:
            console.print(f"[red]✗[/] {flaw}")
        good = bool(self.expected) and not flaws
        verdict = "[bold green]✓ every message came back exactly once, none early, all of them intact[/]"
        console.print(verdict if good else "[bold red]✗ not what was promised[/]", f"[dim]({seconds:.0f} s)[/]")
        return 0 if good else 1

    def _row(self, mode: str) -> list[str]:
        sent = [one for one in self.expected if one.mode == mode]
        back = [one for one in self.arrivals if one.expected.mode == mode]
        late = [one.late_ms for one in back] or [0.0]
        different = {one.expected.number for one in back}
        early = sum(one.late_ms < 0 for one in back)
        changed = sum(bool(one.flaw) and one.late_ms >= 0 for one in back)
        numbers = (len(sent), len(different), len(sent) - len(different), len(back) - len(different), early, changed)
        return [*map(str, numbers), f"{median(late):.0f} ms", f"{max(late):.0f} ms"]


def _flaw(expected: Expected, queue: str, message: AbstractIncomingMessage, late_ms: float) -> str:
    """What is wrong with an arrival: the first thing that is."""
    sent = expected.message
    if late_ms < 0:
        return f"{-late_ms:.1f} ms early"
    if queue != expected.queue:
        return f"expected in {expected.queue}, found in {queue}"
    if message.body != sent.body:
        return "the body changed"
    for name in KEPT:
        if getattr(message, name) != getattr(sent, name):
            return f"{name}: sent {getattr(sent, name)!r}, came back {getattr(message, name)!r}"
    ours = {name: value for name, value in sent.headers.items() if name not in ("x-delay", "x-deliver-at")}
    back = {name: value for name, value in message.headers.items() if name in ours}
    if ours != back:
        return f"headers: sent {ours!r}, came back {back!r}"
    return ""
