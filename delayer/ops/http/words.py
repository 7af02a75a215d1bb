"""What the page says, in sentences and rows. Pure: what was seen in, texts out."""

from __future__ import annotations

from typing import Any, Final

from delayer.core import horizon
from delayer.core.filters import Token
from delayer.ops.http import render
from delayer.ops.http.ports import State
from delayer.store import showing
from delayer.store.cancelling import Found
from delayer.store.census import Census
from delayer.store.showing import Whole

TITLES: Final = {"minutes": "The coming hour", "hours": "Two days", "days": "Two months", "months": "Two years"}


def fate(found: Whole) -> str:
    """What will happen to it, in a sentence. Pure."""
    to = render.address(found.entry.to_exchange, found.entry.to_key)
    said = showing.fate(found, to, render.name(found.owner), render.iso)
    return f"{said[0].upper()}{said[1:]}."


def nowhere(found: Found, token: Token) -> str:
    """Why a message cannot be shown. Pure."""
    if found is Found.UNREADABLE:
        return "It may stand in a segment that does not read back: see docs/backlog.md."
    elsewhere = " at that instant. The id alone, without @…, finds it if it was moved." if token.due_ms else "."
    return f"It is not in the store{elsewhere} It was delivered or cancelled, or was never there."


def blocked(state: State) -> bool:
    """Whether the broker has blocked a connection of this process."""
    return any(line["blocked"] for line in state["connections"].values())


def series(census: Census | None) -> list[dict[str, Any]]:
    """Titles, and the rows of the tables under the chart: bars that are not empty."""
    counts = {} if census is None else census.together()
    found = []
    for one in horizon.SERIES:
        bars = horizon.bars(counts, one)
        ends = [render.roughly(at * one.step / 1000) for at in range(len(bars) + 1)]
        rows = [
            (f"in {first} to {last}", count) for first, last, count in zip(ends, ends[1:], bars, strict=False) if count
        ]
        found.append({"name": one.name, "title": TITLES[one.name], "rows": rows})
    return found


def note(census: Census | None, error: str) -> str:
    """What stands under the chart."""
    if census is None:
        return f"Not counted yet: {error}" if error else "Not counted yet."
    counts = census.together()
    classes = horizon.by_class(counts)
    how = "Counted" if census.exact else "Estimated from samples"
    return (
        f"{how} at {render.iso(census.taken_ms)}: {render.number(sum(counts.values()))} messages, "
        f"{render.number(classes['overdue'])} of them overdue, {render.number(classes[horizon.LATER])} due in more "
        f"than a year.{f' Now: {error}.' if error else ''}"
    )
