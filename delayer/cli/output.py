"""Output of the commands: JSON for programs; tables, notes and instants for people."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from delayer.core.readable import Say, delayed_rows, duration, escaped, format_relative_time, instant, readable

if TYPE_CHECKING:
    from delayer.broker.cascade_depths import CascadeDepths
    from delayer.config.model import Settings
    from delayer.store.admin.stats import LaneOverview

T = TypeVar("T")
SHOWN: Final = 5
"""Names of a list, and rows of a kind, that are printed one by one."""


def print_json(value: object, *, one_line: bool = False) -> None:
    click.echo(escaped(json.dumps(value, indent=None if one_line else 2, ensure_ascii=False, default=_plain)))


def _plain(value: object) -> object:
    return readable(value) if isinstance(value, bytes) else str(value)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, right: Collection[int] = ()) -> None:
    """Print a table on stdout. ``right``: the columns with numbers. On a terminal, rich folds wide cells. Otherwise
    each row is one line, uncut and without trailing blanks."""
    texts = [[readable(str(cell)) for cell in row] for row in rows]
    if sys.stdout.isatty():
        _on_terminal(columns, texts, right)
    else:
        _as_lines(columns, texts, right)


def _on_terminal(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[int]) -> None:
    from rich.console import Console  # noqa: PLC0415 - takes as long to load as a store takes to answer
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        # An id broken over two lines cannot be copied.
        whole = column == "id"
        table.add_column(Text(column), justify="right" if number in right else "left", overflow="fold", no_wrap=whole)
    for row in rows:
        table.add_row(*map(Text, row))
    Console(highlight=False).print(table)


def _as_lines(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[int]) -> None:
    """Print without rich, which takes 14 s for a table of 10,000 rows with 7 cells."""
    from rich.cells import cell_len  # noqa: PLC0415 - as above

    widths = [max(map(cell_len, column)) for column in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        gaps = [" " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)]
        cells = (
            gap + cell if at in right else cell + gap for at, (cell, gap) in enumerate(zip(row, gaps, strict=True))
        )
        click.echo("  ".join(cells).rstrip())


@contextmanager
def progress(step: str = "starting") -> Iterator[Say]:
    """Show a progress bar on stderr if that is a terminal. ``step``: the first step."""
    from rich import progress as bars  # noqa: PLC0415 - as above
    from rich.console import Console  # noqa: PLC0415

    console = Console(stderr=True)
    parts = (
        bars.SpinnerColumn(), bars.TextColumn("{task.description}"), bars.BarColumn(), bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(), bars.TextColumn("left"), bars.TimeRemainingColumn(),
    )  # fmt: skip
    with bars.Progress(*parts, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(step, total=None)

        def say(what: str, done: int, of: int | None) -> None:
            bar.update(task, description=what, completed=done, total=of)

        yield say


def note(text: str) -> None:
    """Print a note on stderr."""
    click.echo(readable(text), err=True)


def note_no_match(elsewhere: str) -> None:
    """Say why a filter may have matched nothing. ``elsewhere``: the command for the other list."""
    note(f"Filters are case-sensitive. Other messages may match: `{elsewhere}`.")


def quoted(name: str) -> str:
    return f'"{readable(name)}"'


def some(names: Sequence[str]) -> str:
    """The first names, quoted, and the number of all if there are more."""
    shown = ", ".join(map(quoted, names[:SHOWN]))
    return shown if len(names) <= SHOWN else f"{shown}, … ({len(names):,} in all)"


def in_groups(rows: Iterable[T], kind: Callable[[T], Hashable]) -> list[tuple[T, int]]:
    """The rows to print: the first SHOWN of each kind, each with 0, then one row for the rest, with their number.

    >>> in_groups([*range(0, 100, 2), 1], lambda number: number % 2)[SHOWN - 1 :]
    [(8, 0), (10, 45), (1, 0)]
    """
    groups: dict[Hashable, list[T]] = {}
    for row in rows:
        groups.setdefault(kind(row), []).append(row)
    found: list[tuple[T, int]] = []
    for group in groups.values():
        found += [(row, 0) for row in group[:SHOWN]]
        if len(group) > SHOWN:
            found.append((group[SHOWN], len(group) - SHOWN))
    return found


def print_queues(settings: Settings, seen: CascadeDepths, *, used: bool, every_level: bool) -> None:
    """Print the depths of the cascade and of the queues around it. ``used``: whether new delays use the cascade.
    ``every_level``: include empty levels."""
    of_every_mode = (settings.intake.queue, settings.refused.queue)

    def depth(name: str, messages: int | None) -> str:
        if messages is not None:
            return str(messages)
        if not used and name not in of_every_mode:
            return "not used in store mode"
        return "hidden from this user" if name in seen.hidden else "missing"

    rows: list[tuple[object, ...]] = [
        (one.level, one.name, duration(one.ttl_ms / 1000), depth(one.name, one.depth))
        for one in seen.levels
        if every_level or one.depth != 0
    ]
    if all(one.depth is None for one in seen.levels):
        rows = [("", "cascade", "", depth(seen.levels[0].name, None))]
    elif not every_level:
        rows.append(("", "cascade, all levels", "", sum(one.depth or 0 for one in seen.levels)))
    rows += [("", name, "", depth(name, messages)) for name, messages in seen.queues.items()]
    rows += [("", what, "", count) for what, count in delayed_rows(seen.delayed)]
    print_table(["level", "queue", "waits", "messages"], rows, right=(0, 2, 3))


def json_of_lane(lane: LaneOverview) -> dict[str, Any]:
    return {
        "lane": lane.number,
        "route": None if lane.route is None else lane.route.decode(errors="replace"),
        "released": lane.counters["released"],
        **{name: getattr(lane, name) for name in ("owner", "alive", "stuck_ms", "waiting", "held")},
        **{name: getattr(lane, name) for name in ("next_due_ms", "next_retry_ms")},
    }


def print_lanes(lanes: Sequence[dict[str, Any]], now_ms: int) -> None:
    """Print a table of the lanes of :func:`json_of_lane`."""
    rows = [
        (
            one["lane"],
            one["route"] or "",
            one["owner"] or "–",
            "stuck" if one["stuck_ms"] else "running" if one["alive"] else "free",
            *(one[name] for name in ("waiting", "held", "released")),
            when(one["next_due_ms"], now_ms),
        )
        for one in lanes
    ]
    columns = ["lane", "of route", "owner", "", "waiting", "held", "released", "next due"]
    print_table(columns, rows, right=(0, 4, 5, 6))


def when(due_ms: int | None, now_ms: int | None = None) -> str:
    """Format an instant in UTC, and how far off it is."""
    if due_ms is None:
        return "–"
    now_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    return f"{instant(due_ms)} ({format_relative_time(due_ms, now_ms)})"


def per_second(count: int, seconds: float) -> str:
    return f"{count / seconds:,.0f}/s" if seconds else "-"
