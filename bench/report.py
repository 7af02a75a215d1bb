"""The table that a person reads."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from bench.figures import Figure, Result

_UNITS = {
    "rate": "/s",
    "body": " B",
    "backlog": " waiting",
    "workers": " processes",
    "count": " messages",
    "log": " MB a log",
}
_OF_ONE = {"workers": " process", "count": " message"}


def figures_table(result: Result) -> RenderableType:
    """A table for each section, what was judged at all marked with whether it reached its target."""
    parts: list[RenderableType] = []
    for section, figures in groupby(result.figures, key=lambda figure: figure.section):
        table = Table(title=section, title_justify="left", title_style="bold", pad_edge=False, box=None)
        for heading, justify in (("", "left"), ("", "right"), ("", "left"), ("ratio", "right"), ("of", "left")):
            table.add_column(heading, justify=justify, header_style="dim", no_wrap=heading != "of")
        table.add_column("target", header_style="dim")
        for row in rows(grouped(list(figures))):
            table.add_row(*row)
        parts += [table, Text()]
    parts += [Text(f"! {note(one)}", style="yellow") for one in result.notes]
    return Group(*parts)


def rows(figures: Sequence[Figure]) -> Iterable[tuple[RenderableType, ...]]:
    """The cells of one section, a row for each figure; conditions are told when they change."""
    told: dict[str, int] = {}
    for figure in figures:
        if figure.at != told and figure.at:
            yield (Text(conditions(figure.at), style="italic dim"),)
        told = figure.at
        ratio = "" if figure.ratio is None else share(figure.ratio)
        yield (f"  {figure.what}", number(figure.value), figure.unit, ratio, figure.of, verdicts(figure))


def conditions(at: dict[str, int]) -> str:
    return ", ".join(_condition(name, value) for name, value in at.items())


def _condition(name: str, value: int) -> str:
    units = _UNITS | _OF_ONE if value == 1 else _UNITS
    return f"{value:,}{units.get(name, f' {name}')}"


def grouped(figures: Sequence[Figure]) -> list[Figure]:
    """What was measured under the same conditions stands together, in the order of the first of each."""
    seen = list(dict.fromkeys(conditions(figure.at) for figure in figures))
    return sorted(figures, key=lambda figure: (bool(figure.at), seen.index(conditions(figure.at))))


def note(text: str) -> str:
    """In words: notes of older runs have conditions as Python prints them."""
    return re.sub(r"\{[^{}]*\}", lambda found: conditions(ast.literal_eval(found[0])), text)


def share(ratio: float) -> str:
    """Three digits: with two, 0.8994 would be the 0.90 that it misses."""
    return f"{ratio:.3f}"


def number(value: float) -> str:
    """As many digits as mean something."""
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def verdicts(figure: Figure) -> Text:
    text = Text()
    for target in figure.targets:
        mark, style = ("✓", "green") if target["met"] else ("✗", "red")
        text.append(f"{mark} {target['text']}  ", style=style)
    return text


def judged(figure: Figure, target: dict[str, Any]) -> str:
    """What a target looked at: the figure itself, or a ratio."""
    itself = target["found"] == round(figure.value, 3)
    return f"{number(figure.value)} {figure.unit}".strip() if itself else share(target["found"])


def heading(result: Result) -> str:
    about = result.about
    versions = ", ".join(f"{name} {version}" for name, version in about.get("versions", {}).items())
    return f"{about.get('kind', '')} run of {about.get('revision', '?')} on {about.get('machine', '?')}; {versions}"


def show(result: Result, console: Console) -> None:
    console.print(Text(heading(result), style="dim"))
    console.print("Rates: between 10 % and 90 % of the count. Ratios: to the ceilings of this run.", style="dim")
    console.print()
    console.print(figures_table(result))
    judged = [target for figure in result.figures for target in figure.targets]
    if judged:
        console.print(f"{sum(target['met'] for target in judged)} of {len(judged)} targets met; they are information.")
    if missing := result.about.get("not_judged"):
        # A quick run has few of them; a full one should have them all.
        names = "" if result.about.get("kind") == "quick" else f": {'; '.join(missing)}"
        console.print(f"{len(missing)} not judged, for want of a figure{names}.", style="dim", highlight=False)
