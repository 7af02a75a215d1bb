"""What the verbs that work with Spark share: options, a progress bar, and their figures for people."""

from __future__ import annotations

from typing import NamedTuple

import click

from delayer.cli.options import assignments
from delayer.config import duration_ms


class Spark(NamedTuple):
    """Where a job's tasks run (None: here), and what was said of Spark's settings."""

    master: str | None
    conf: dict[str, str]


master_option = click.option(
    "--master", metavar="URL", help="Spark's master, such as spark://host:7077. [default: all cores of this machine]"
)


conf_option = click.option(
    "--conf",
    "conf",
    multiple=True,
    callback=assignments("spark.driver.memory=4g"),
    metavar="KEY=VALUE",
    help="Set one of Spark's settings.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def duration(_context: click.Context, _option: click.Parameter, text: str | None) -> int | None:
    """Milliseconds of an option's text."""
    try:
        return None if text is None else duration_ms(text)
    except ValueError as error:
        raise click.BadParameter(f"expected {error}, found {text!r}") from None


def in_bytes(count: float) -> str:
    """For people: 1.5 GB, with decimal prefixes."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def per_second(count: int, seconds: float) -> str:
    return f"{count / seconds:,.0f}/s" if seconds else "-"
