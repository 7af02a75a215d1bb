"""The demo's live view: what waits, what came back just now, and how late."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tests.support.demo_ledger import Arrival, Ledger

SHOWN = 14


class View:
    """Redraws itself on a terminal; prints a line for each arrival elsewhere."""

    def __init__(self, console: Console, ledger: Ledger) -> None:
        self._console = console
        self._ledger = ledger
        self._phase = ""
        self._live = Live(get_renderable=self._draw, console=console, refresh_per_second=8, transient=True)
        self._printed = 0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        else:
            self._ledger.on_arrival = self._print
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()
            self._console.print(self._arrivals(len(self._ledger.arrivals)))

    def phase(self, text: str) -> None:
        self._phase = text
        if not self._console.is_terminal:
            self._console.print(f"— {text}")

    def _print(self, arrival: Arrival) -> None:
        sent = arrival.expected
        self._console.print(
            f"{sent.mode:6}  {sent.route:24}  asked {sent.seconds:5.1f} s  late {arrival.late_ms:6.0f} ms",
            arrival.flaw,
        )

    def _draw(self) -> RenderableType:
        sent, back = len(self._ledger.expected), self._ledger.count()
        bar = ProgressBar(total=max(sent, 1), completed=back, width=40)
        line = Table.grid(padding=(0, 1))
        line.add_row(bar, Text(f"{back} of {sent} back", style="bold"))
        return Group(Text(self._phase, style="cyan"), line, self._waiting(), Text(""), self._arrivals(SHOWN))

    def _waiting(self) -> RenderableType:
        here = {arrival.expected.number for arrival in self._ledger.arrivals}
        now_ms = time.time() * 1000
        rest = sorted((one.due_ms - now_ms) / 1000 for one in self._ledger.expected if one.number not in here)
        if not rest:
            return Text("nothing waits", style="dim")
        return Text(
            f"{len(rest)} wait; next due in {max(rest[0], 0):.1f} s, last in {max(rest[-1], 0):.1f} s", style="dim"
        )

    def _arrivals(self, last: int) -> Table:
        table = Table(box=None, pad_edge=False)
        for heading, justify in (
            ("mode", "left"),
            ("route", "left"),
            ("asked", "right"),
            ("late", "right"),
            ("", "left"),
        ):
            table.add_column(heading, justify=justify)  # type: ignore[arg-type]
        for arrival in self._ledger.arrivals[-last:]:
            sent = arrival.expected
            mark = Text(f"✗ {arrival.flaw}", style="red") if arrival.flaw else Text("✓", style="green")
            table.add_row(sent.mode, sent.route, f"{sent.seconds:.1f} s", f"{arrival.late_ms:.0f} ms", mark)
        return table
