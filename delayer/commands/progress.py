"""How far a command is: a bar on stderr while somebody watches a terminal, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

Say = Callable[[str, int, int | None], None]
"""Told what is being done, how much of it is done, and how much there is, where that is known."""


@contextmanager
def progress() -> Iterator[Say]:
    """What to tell it with."""
    console = Console(stderr=True)
    columns = (
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def say(what: str, done: int, of: int | None) -> None:
            bar.update(task, description=what, completed=done, total=of)

        yield say
