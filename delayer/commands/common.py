"""What every verb needs: the settings, errors that name the next step, tables for people and JSON for programs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from delayer import settings as configuration
from delayer.audit.errors import DaemonsOutdated, JobFailed, JobImpossible, JobMisused
from delayer.broker.errors import BrokerRefused, TopologyMismatch
from delayer.core.errors import BrokerLost, StoreLost
from delayer.settings import ConfigError, Settings
from delayer.store.errors import BadStoreUrl, SchemaOutdated
from delayer.telemetry import readable

DONE, FOUND, USAGE, OUT_OF_REACH = 0, 1, 2, 3
"""The exit codes: done; a check found something; usage or configuration; broker or store out of reach."""

WIDTH_WITHOUT_TERMINAL = 160


@dataclass(frozen=True, slots=True)
class Request:
    """The options before the verb. Settings are read when a verb asks for them, so that ``--help`` never fails."""

    config: Path | None = None
    flags: Mapping[str, str] = field(default_factory=dict)

    def settings(self) -> Settings:
        """Raises ConfigError."""
        return configuration.load(self.config, os.environ, self.flags)

    @property
    def file(self) -> Path | None:
        return configuration.config_file(self.config, os.environ)


def request_of(context: click.Context) -> Request:
    """What the group put there before the verb was called."""
    request = context.find_object(Request)
    assert request is not None
    return request


class Failure(click.ClickException):
    """An expected error: a message without a traceback. The subclasses have the exit codes."""

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"delayer: {self.message}", file=file, err=True)


class Off(Failure):
    """Something is not as it should be."""

    exit_code = FOUND


class Misused(Failure):
    """Usage or configuration."""

    exit_code = USAGE


class Unreached(Failure):
    """Broker or store out of reach."""

    exit_code = OUT_OF_REACH


EXPECTED_ERRORS = (
    ConfigError, BrokerLost, BrokerRefused, TopologyMismatch, StoreLost, SchemaOutdated, BadStoreUrl,
    JobImpossible, JobMisused, JobFailed, DaemonsOutdated,
)  # fmt: skip


def failure(error: Exception) -> Failure:
    """What went wrong, and what to do next, for one of :data:`EXPECTED_ERRORS`."""
    text = readable(str(error))
    match error:
        case ConfigError(problems=problems):
            lines = "\n".join(f"  {problem}" for problem in problems)
            made: Failure = Misused(
                f"the configuration has {len(problems)} mistake{'s' * (len(problems) > 1)}:\n{lines}"
            )
        case TopologyMismatch(mismatches=mismatches):
            lines = "\n".join(f"  {readable(str(one))}" for one in mismatches)
            advice = (
                "Nothing was bound. The broker names the first difference only; compare all that is expected.\n"
                "Either empty and delete these (`rabbitmqctl delete_queue NAME`), or choose other names in the "
                "configuration;\nthen run `delayer topology apply` again."
            )
            made = Off(f"the broker has things of these names that are different:\n{lines}\n{advice}")
        case BadStoreUrl() | JobMisused():
            made = Misused(text)
        case JobImpossible():
            made = Unreached(text)
        case BrokerRefused():
            made = Unreached(f"the broker refused: {text}. Next: check broker.url and the user's permissions.")
        case BrokerLost():
            made = Unreached(f"the broker is out of reach: {text}. Next: check broker.url, and that it runs.")
        case StoreLost(advice=advice) if advice:
            made = Unreached(f"the store refused: {text}. Next: {advice}.")
        case StoreLost():
            made = Unreached(f"the store is out of reach: {text}. Next: check store.url, and that it runs.")
        case _:
            made = Off(text)  # what is outdated has its advice in its text, JobFailed Spark's reason
    return made


def print_json(value: object) -> None:
    """One JSON document on stdout, and nothing else there."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False, default=_plain))


def _plain(value: object) -> object:
    return readable(value) if isinstance(value, bytes) else str(value)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, right: Iterable[int] = ()) -> None:
    """A table on stdout. ``right``: the columns with numbers. Nothing in a cell is taken for markup."""
    console = Console(highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console.width = WIDTH_WITHOUT_TERMINAL
    table = Table(box=None, pad_edge=False, header_style="bold")
    numbers = set(right)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(readable(str(cell))) for cell in row))
    console.print(table)


def note(text: str) -> None:
    """A remark for people, on stderr."""
    click.echo(readable(text), err=True)


def quoted(name: str) -> str:
    return f'"{readable(name)}"'


def depth_text(depth: int | None, *, used: bool = True) -> str:
    """How many messages are in a queue; ``used``: whether this configuration needs it at all."""
    if depth is None:
        return "missing" if used else "not used in store mode"
    return str(depth)
