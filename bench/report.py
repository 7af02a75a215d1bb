"""The table that a person reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from bench.figures import Figure, Result

_UNITS = {"rate": "/s", "body": " B", "backlog": " waiting", "workers": " processes", "count": " messages"}


def figures_table(result: Result) -> RenderableType:
    """A table for each section, what was judged at all marked with whether it reached its target."""
    parts: list[RenderableType] = []
    for section, figures in groupby(result.figures, key=lambda figure: figure.section):
        table = Table(title=section, title_justify="left", title_style="bold", pad_edge=False, box=None)
        for heading, justify in (("", "left"), ("", "right"), ("", "left"), ("ratio", "right"), ("of", "left")):
            table.add_column(heading, justify=justify, header_style="dim", no_wrap=heading != "of")
        table.add_column("target", header_style="dim")
        for row in rows(list(figures)):
            table.add_row(*row)
        parts += [table, Text()]
    parts += [Text(f"! {note}", style="yellow") for note in result.notes]
    return Group(*parts)


def rows(figures: Sequence[Figure]) -> Iterable[tuple[RenderableType, ...]]:
    """The cells of one section, a row for each figure; conditions are told when they change."""
    told: dict[str, int] = {}
    for figure in figures:
        if figure.at != told and figure.at:
            yield (Text(conditions(figure.at), style="italic dim"),)
        told = figure.at
        ratio = "" if figure.ratio is None else f"{figure.ratio:.2f}"
        yield (f"  {figure.what}", number(figure.value), figure.unit, ratio, figure.of, verdicts(figure))


def conditions(at: dict[str, int]) -> str:
    return ", ".join(f"{value:,}{_UNITS.get(name, f' {name}')}" for name, value in at.items())


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
