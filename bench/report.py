"""The tables of a run: rates and their ceilings, lateness, the causes of stalls, and the cost per message."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.ceilings import CONSUME, COPY, PUBLISH
from bench.figures import Figure, Result
from bench.http import KINDS as SENT
from bench.keys import KINDS, PLAIN
from bench.limits import stop
from bench.sql import INSERT, MOVE, PARK, SEND

CEILINGS: dict[tuple[str, str], tuple[tuple[str, str], ...]] = {
    ("park", "park"): (("ceilings", CONSUME), ("ceilings", COPY)),
    ("release", "release"): (("ceilings", PUBLISH),),
    ("burst", "rate"): (("ceilings", PUBLISH),),
    **{("keys", what): (("keys", PLAIN),) for kind, what in KINDS.items() if kind != PLAIN},
    **{("http", what): (("park", "park"),) for what in SENT},
    ("sql", SEND): (("sql", INSERT),),
    ("sql", MOVE): (("sql", PARK),),
    ("native", "into the cascade"): (("native", "straight client into the cascade"),),
}
"""Each rate, and the figures of the same run that it cannot exceed; the smaller one applies. Keys are compared with
plain messages, and the SQL inbox with parking by AMQP."""
TREES = ("daemon", "broker", "database")
UNITS = {"rate": "/s", "body": " B", "backlog": " waiting", "count": " messages"}
SHARES = ("p50", "p99", "p99.9", "max")
COUNTED = ("msg", "rows", "stalls")
PARTS = ("daemon", "lane", "database", "database log", "broker", "queue", "queue log")
HALVES = ("first half hour", "last half hour", "last over first")
_STALL = re.compile(r"(.*), (\w+): (deliveries|stalls|worst)")
_HALF = re.compile(f"(.*), ({'|'.join(HALVES)})")
_CHECK = re.compile("(.*), (predicted|measured)")
_FULL = re.compile(r"(.*), full: (.*)")
_ELSEWHERE = (_STALL, _HALF, _CHECK, _FULL)
"""Figures with a table of their own."""


class Sheet(NamedTuple):
    """Format a table as text."""

    title: str
    heads: tuple[str, ...]
    rows: list[tuple[str, ...]]


def sheets(result: Result) -> list[Sheet]:
    """The tables; a table without rows is left out."""
    heads = ("", "conditions", "measured", "ceiling of this run", "ratio", "all cores allow", "ratio")
    rates = Sheet("Rates", heads, list(_rates(result)))
    late = Sheet("Lateness", ("", "conditions", *SHARES), list(_lateness(result)))
    heads = ("", "conditions", "later than 50 ms because of", "deliveries", "share", "stalls", "worst")
    stalls = Sheet("Stalls", heads, list(_stalls(result)))
    cost = Sheet("Cost", ("", "conditions", "measured"), list(_costs(result)))
    growth = Sheet("Growth", ("", "conditions", *HALVES), list(_growth(result)))
    checks = Sheet("Model", ("", "conditions", "predicted", "measured", "ratio"), list(_checks(result)))
    full = Sheet("Limits", ("full at, messages/s", "conditions", *PARTS, "stops at"), list(_full(result)))
    return [sheet for sheet in (rates, late, stalls, growth, checks, full, cost) if sheet.rows]


def _rates(result: Result) -> Iterable[tuple[str, ...]]:
    for figure in result.figures:
        if figure.unit not in ("msg/s", "rows/s") or _is_elsewhere(figure):
            continue
        limits = (ceiling_of(result, figure), allowed_by_cores(result, figure))
        beside = [("", "") if one is None else (shown(one), f"{figure.value / one.value:.2f}") for one in limits]
        yield (f"{figure.section}: {figure.what}", conditions(figure.at), shown(figure), *beside[0], *beside[1])


def _lateness(result: Result) -> Iterable[tuple[str, ...]]:
    seen: dict[tuple[str, str, str], dict[str, str]] = {}
    for figure in result.figures:
        before, found, share = figure.what.partition("lateness ")
        if found and figure.unit == "ms":
            name = before.rstrip(", ") or "delayer"
            seen.setdefault((figure.section, name, conditions(figure.at)), {})[share] = shown(figure)
    for (section, name, at), by_share in seen.items():
        yield (f"{section}: {name}", at, *(by_share.get(share, "") for share in SHARES))


def _stalls(result: Result) -> Iterable[tuple[str, ...]]:
    """A row for each turn and cause, with the cause's share of all late deliveries of the turn."""
    seen: dict[tuple[str, str], dict[str, dict[str, Figure]]] = {}
    for figure in result.figures:
        if found := _STALL.fullmatch(figure.what):
            what, cause, of_it = found.groups()
            seen.setdefault((what, conditions(figure.at)), {}).setdefault(cause, {})[of_it] = figure
    for (what, at), causes in seen.items():
        late = sum(one["deliveries"].value for one in causes.values())
        for cause, one in causes.items():
            share = f"{one['deliveries'].value / late:.0%}" if late else ""
            yield (
                f"stalls: {what}",
                at,
                cause,
                shown(one["deliveries"]),
                share,
                *map(shown, (one["stalls"], one["worst"])),
            )


def _growth(result: Result) -> Iterable[tuple[str, ...]]:
    seen: dict[tuple[str, str], dict[str, str]] = {}
    for figure in result.figures:
        if found := _HALF.fullmatch(figure.what):
            seen.setdefault((f"{figure.section}: {found[1]}", conditions(figure.at)), {})[found[2]] = shown(figure)
    for (what, at), by_half in seen.items():
        yield (what, at, *(by_half.get(half, "") for half in HALVES))


def _checks(result: Result) -> Iterable[tuple[str, ...]]:
    """What a model says of a rate, and the rate."""
    seen: dict[tuple[str, str], dict[str, Figure]] = {}
    for figure in result.figures:
        if found := _CHECK.fullmatch(figure.what):
            seen.setdefault((f"{figure.section}: {found[1]}", conditions(figure.at)), {})[found[2]] = figure
    for (what, at), one in seen.items():
        predicted, measured = one["predicted"], one["measured"]
        yield (what, at, shown(predicted), shown(measured), f"{measured.value / predicted.value:.2f}")


def _full(result: Result) -> Iterable[tuple[str, ...]]:
    """The rates at which the parts of an installation are full, and the part with the smallest."""
    seen: dict[tuple[str, str], dict[str, float]] = {}
    for figure in result.figures:
        if found := _FULL.fullmatch(figure.what):
            seen.setdefault((f"{figure.section}: {found[1]}", conditions(figure.at)), {})[found[2]] = figure.value
    for (what, at), rates in seen.items():
        yield (what, at, *(f"{rates[part]:,.0f}" if part in rates else "" for part in PARTS), stop(rates)[0])


def _is_elsewhere(figure: Figure) -> bool:
    return any(one.fullmatch(figure.what) for one in _ELSEWHERE)


def _costs(result: Result) -> Iterable[tuple[str, ...]]:
    """Everything that has no place in the other tables."""
    for figure in result.figures:
        if figure.unit in ("msg/s", "rows/s") or _is_elsewhere(figure):
            continue
        if "lateness" not in figure.what:
            yield (f"{figure.section}: {figure.what}", conditions(figure.at), shown(figure))


def ceiling_of(result: Result, figure: Figure) -> Figure | None:
    """The figure of the same run that this one cannot exceed."""
    body = {"body": figure.at.get("body", 512)}
    named = CEILINGS.get((figure.section, figure.what), ())
    found = [result.find(section, what, **(body if section == "ceilings" else {})) for section, what in named]
    return min((one for one in found if one is not None and one.value), key=lambda one: one.value, default=None)


def allowed_by_cores(result: Result, figure: Figure) -> Figure | None:
    """The rate at which the CPU that daemon, broker and database spent on each message would fill all cores."""
    spent = [result.find(figure.section, f"CPU of {tree}", **figure.at) for tree in TREES]
    if figure.what != figure.section or None in spent:
        return None
    cpu_us = sum(one.value for one in spent if one is not None)
    return Figure(figure.section, "allowed", result.about["cores"] * 1e6 / cpu_us, figure.unit, figure.at)


def conditions(at: dict[str, int]) -> str:
    return ", ".join(f"{value:,}{UNITS.get(name, f' {name}')}" for name, value in at.items())


def shown(figure: Figure) -> str:
    """The value with its significant digits, and its unit."""
    value = figure.value
    digits = 0 if value == 0 or abs(value) >= 1000 or figure.unit in COUNTED else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f} {figure.unit}".rstrip()


def heading(result: Result) -> str:
    told = result.about
    versions = ", ".join(f"{name} {version}" for name, version in told["versions"].items())
    at = datetime.fromisoformat(told["at"])
    return f"{at:%Y-%m-%d %H:%M} UTC, revision {told['revision']}, {told['machine']}; {versions}"


def show(result: Result, console: Console) -> None:
    console.print(Text(heading(result), style="dim"))
    for sheet in sheets(result):
        table = Table(title=sheet.title, title_justify="left", title_style="bold", pad_edge=False, box=None)
        for at, head in enumerate(sheet.heads):
            table.add_column(head, justify="left" if at < 2 else "right", header_style="dim")
        for row in sheet.rows:
            table.add_row(*row)
        console.print(table)
        console.print()
    for note in result.notes:
        console.print(Text(f"! {note}", style="yellow"))


def markdown(result: Result) -> str:
    """All tables of a result in Markdown."""
    lines = [heading(result), ""]
    for sheet in sheets(result):
        lines += [f"### {sheet.title}", "", *markdown_table(sheet), ""]
    lines += [f"- {note}" for note in result.notes]
    return "\n".join(lines).rstrip()


def markdown_table(sheet: Sheet) -> list[str]:
    """Its lines in Markdown."""
    return [_line(sheet.heads), _line(["---"] * len(sheet.heads)), *map(_line, sheet.rows)]


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
