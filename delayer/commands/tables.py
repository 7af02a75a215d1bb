"""Tables for people. What fits on the screen as it is, which is nearly always, is laid out here; what has to be folded,
or has characters that are not one column wide, by rich: loading it takes as long as asking a store.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from typing import Final

import click

WIDTH_WITHOUT_TERMINAL: Final = 160
WIDTH_UNKNOWN: Final = 80
GAP: Final = "  "
_DUMB: Final = ("", "dumb", "unknown")


def show(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[int]) -> None:
    """Print a table on stdout. ``right``: the columns with numbers."""
    on_screen = sys.stdout.isatty()
    lines = laid_out(columns, rows, right, _width() if on_screen else WIDTH_WITHOUT_TERMINAL)
    if lines is None:
        _folded(columns, rows, right)
        return
    if on_screen and os.environ.get("TERM", "") not in _DUMB:
        lines[0] = click.style(lines[0], bold=True)
    click.echo("\n".join(lines))


def laid_out(
    columns: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[int], width: int
) -> list[str] | None:
    """The lines, the columns' names first; None where it takes more than spaces to make a table of it. Pure."""
    table = [columns, *rows]
    if not all(cell.isascii() for row in table for cell in row):
        return None
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    if sum(widths) + len(GAP) * (len(widths) - 1) > width:
        return None
    return [
        GAP.join(
            cell.rjust(wide) if number in right else cell.ljust(wide)
            for number, (cell, wide) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


def _width() -> int:
    try:
        return int(os.environ["COLUMNS"])
    except (KeyError, ValueError):
        pass
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or WIDTH_UNKNOWN
    except OSError:
        return WIDTH_UNKNOWN


def _folded(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[int]) -> None:
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    console = Console(highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console.width = WIDTH_WITHOUT_TERMINAL
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)
