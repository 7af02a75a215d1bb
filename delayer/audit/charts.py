"""The calendar as SVG for the page: text stays text, colours are the page's own, nothing is fetched.

Each chart is drawn twice, for wide and for narrow screens, because a drawing that shrinks takes its letters along.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.ticker import FuncFormatter, MaxNLocator

from delayer.audit.findings import Bar
from delayer.audit.ticks import ticks
from delayer.audit.words import counted, instant, short, width

_LAST_MS: Final = 221_845_305_600_000
"""The year 9000: the calendar ends with 9999."""
_MOST: Final = 0.999
"""The share of messages that must be drawn."""
# Colours that nobody would choose stand for the page's, which change with its light.
_COLOURS: Final = {
    "#0a0a01": "--ink", "#0a0a02": "--faint", "#0a0a03": "--grid", "#0a0a04": "--bar", "#0a0a05": "--bad",
}  # fmt: skip
_INK, _FAINT, _GRID, _BAR, _BAD = _COLOURS
_STYLE: Final[Any] = {
    "svg.fonttype": "none", "font.family": "sans-serif", "text.color": _INK, "axes.labelcolor": _FAINT,
    "axes.edgecolor": _FAINT, "xtick.color": _FAINT, "ytick.color": _FAINT, "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK, "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False,
    "axes.grid": True, "axes.grid.axis": "y", "grid.color": _GRID, "axes.axisbelow": True, "ytick.major.size": 0,
    "figure.constrained_layout.use": True, "svg.hashsalt": "delayer",
}  # fmt: skip


class Sheet(NamedTuple):
    """``inches`` of 72 units each, the size of letters, and how many bars and marks of the axis there is room for."""

    name: str
    inches: tuple[float, float]
    letters: float
    bars: int
    marks: int


SHEETS: Final = (Sheet("wide", (15.0, 3.6), 13, 240, 12), Sheet("narrow", (5.0, 3.0), 12, 90, 5))


@dataclass(frozen=True, slots=True)
class Chart:
    """``svg`` by the name of the sheet, ``told``: the same for who cannot see it, ``notes``: how to read each."""

    svg: dict[str, str]
    told: str
    notes: dict[str, str]


def calendar(bars: Sequence[Bar], now_ms: int, release_rate: float, ident: str) -> Chart | None:
    """Due messages over time, from bars of one width. None where there are none. ``ident`` is unique on the page."""
    drawable = sorted((bar for bar in bars if bar.messages and 0 <= bar.start_ms < _LAST_MS), key=lambda b: b.start_ms)
    if not drawable:
        return None
    drawable, later = _near(drawable)
    unit = width(drawable[0].width_ms)
    first, last, top = drawable[0], drawable[-1], max(drawable, key=lambda bar: bar.messages)
    together = sum(bar.messages for bar in drawable)
    told = (
        f"{together:,} messages from {instant(first.start_ms)} to {instant(last.start_ms)};"
        f" the most in one {unit}: {top.messages:,} on {instant(top.start_ms)}"
    )
    svg, notes = {}, {}
    with mpl.rc_context(_STYLE):
        for sheet in SHEETS:
            each, shown = _joined(drawable, sheet.bars)
            notes[sheet.name] = _note(unit, each, later)
            svg[sheet.name] = _drawn(shown, now_ms, release_rate * drawable[0].width_ms / 1000, sheet, ident)
    return Chart(svg, told, notes)


def _note(unit: str, each: int, later: Sequence[Bar]) -> str:
    notes = [f"Each bar is the busiest {unit} of {each}."] if each > 1 else []
    if later:
        left_out = sum(bar.messages for bar in later)
        notes.append(f"{counted(left_out, 'message')} later, up to {instant(later[-1].start_ms)}, not drawn.")
    return " ".join(notes)


def _near(bars: list[Bar]) -> tuple[list[Bar], list[Bar]]:
    """The bars to draw, and those at the far end to leave out: a few messages due in ten years would squeeze the year
    that everything else is due in into a corner."""
    total, seen = sum(bar.messages for bar in bars), 0
    for n, bar in enumerate(bars, 1):
        seen += bar.messages
        if seen >= total * _MOST:
            span = bar.start_ms + bar.width_ms - bars[0].start_ms
            far = bars[-1].start_ms + bars[-1].width_ms - bars[0].start_ms > 2 * span
            return (bars[:n], bars[n:]) if far else (bars, [])
    return bars, []


def _joined(bars: Sequence[Bar], room: int) -> tuple[int, list[Bar]]:
    """At most ``room`` bars: of so many in a row only the highest counts, so that no peak is smoothed away."""
    each = bars[0].width_ms
    start, span = bars[0].start_ms, bars[-1].start_ms - bars[0].start_ms + each
    together = -(-span // (each * room))
    if together == 1:
        return 1, list(bars)
    highest: dict[int, Bar] = {}
    for bar in bars:
        at = (bar.start_ms - start) // (each * together)
        if at not in highest or highest[at].messages < bar.messages:
            highest[at] = bar
    wide = each * together
    return together, [Bar(start + at * wide, wide, bar.messages, bar.size) for at, bar in sorted(highest.items())]


def _drawn(bars: Sequence[Bar], now_ms: int, drained: float, sheet: Sheet, ident: str) -> str:
    with mpl.rc_context({"font.size": sheet.letters, "svg.hashsalt": f"{ident}-{sheet.name}"}):
        figure = Figure(figsize=sheet.inches)
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        late = [bar for bar in bars if bar.start_ms + bar.width_ms <= now_ms]
        for some, colour in ((late, _BAD), (bars[len(late) :], _BAR)):
            if some:
                axes.add_patch(PathPatch(_rectangles(some), facecolor=colour, edgecolor="none", linewidth=0))
        _scale(axes, bars, sheet)
        _marks(axes, bars, now_ms, drained)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    return _inlined(out.getvalue())


def _rectangles(bars: Sequence[Bar]) -> Path:
    """One path for all: a page with thousands of elements scrolls badly."""
    corners: list[tuple[float, float]] = []
    for bar in bars:
        left, right = bar.start_ms, (bar.start_ms + bar.width_ms * 0.92)
        corners += [(left, 0), (left, bar.messages), (right, bar.messages), (right, 0), (left, 0)]
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(bars)
    return Path(corners, codes)


def _scale(axes: Axes, bars: Sequence[Bar], sheet: Sheet) -> None:
    top = max(bar.messages for bar in bars)
    left, right = bars[0].start_ms, (bars[-1].start_ms + bars[-1].width_ms)
    # A lone bar would fill the sheet.
    margin = max((right - left) * 0.01, 12 * bars[0].width_ms if len(bars) < 8 else 0)
    axes.set_xlim(left - margin, right + margin)
    axes.set_ylim(0, top * 1.22)
    marks = ticks(round(axes.get_xlim()[0]), round(axes.get_xlim()[1]), sheet.marks)
    axes.set_xticks([tick.at_ms for tick in marks], [tick.label for tick in marks])
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))


def _marks(axes: Axes, bars: Sequence[Bar], now_ms: int, drained: float) -> None:
    """The highest bar's figure; now, if it is on the sheet; and what is released in one bar's time, if that is near."""
    top = max(bars, key=lambda bar: bar.messages)
    middle = top.start_ms + top.width_ms * 0.46
    axes.annotate(
        short(top.messages), (middle, top.messages), (0, 3), textcoords="offset points", ha="center", fontweight="bold"
    )
    low, high = axes.get_xlim()
    if low <= now_ms <= high:
        axes.axvline(now_ms, color=_INK, linewidth=1, linestyle=(0, (2, 2)))
    if top.messages * 0.3 <= drained <= top.messages * 1.2:
        axes.axhline(drained, color=_BAD, linewidth=1, linestyle=(0, (4, 3)))


def _inlined(svg: str) -> str:
    """The drawing as a part of a page: no prologue, no metadata, no size of its own, the page's colours and letters."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*pt"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*pt"', r"\1", svg, count=1)
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # what is referred to, clips and marks, has names made from hashes
    svg = re.sub(r"font-family: [^;\"]*; ?", "", svg)
    svg = re.sub(r"font: ((?:[a-z0-9]+ )*)([0-9.]+)px [^;\"]*", r"font-size: \2px; font-weight: bold", svg)
    for sentinel, variable in _COLOURS.items():
        svg = svg.replace(sentinel, f"var({variable})")
    return svg.strip()
