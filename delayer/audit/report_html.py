"""The audit as one page without scripts or requests, readable offline, on paper and on a phone.

Exchanges, keys and routes come over AMQP, so we do not control their bytes. ``words.name`` removes everything
unprintable, the template escapes the rest, and the page's policy forbids scripts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from delayer import __version__
from delayer.audit import words
from delayer.audit.files import replacing
from delayer.audit.findings import AuditReport, Bar, LaneFigures, Past
from delayer.core.readable import counted, duration, format_relative_time, instant, size
from delayer.core.units import HOUR_MS
from delayer.store.admin.stats import waiting_of

_HELPERS: Final = (
    instant, format_relative_time, duration, size, counted, words.width, words.name, words.details, words.behind,
    words.sampled, words.late, words.destination, words.tone, words.verdict, words.groups, words.destinations,
    words.peaks, words.unread, words.advice,
)  # fmt: skip


LATE_ROUTES: Final = 5
"""Maximum number of routes with a lateness chart."""
ROOM: Final = 240
"""Maximum number of bars of a chart."""


def page(report: AuditReport) -> str:
    most = max((one.messages for one in report.calendar.destinations), default=1)
    return _template().render(
        report=report,
        version=__version__,
        charts=list(_charts(report)),
        past_charts=list(_past_charts(report.past)) if report.past is not None else [],
        asked=next((run.skipped for run in report.rules if run.rule == "destinations"), ""),
        share=lambda messages: 100 * messages / max(most, 1),
        off=_off,
        kinds=("parked", "restored", "released", "cancelled", "compacted"),
    )


def write(report: AuditReport, path: Path) -> None:
    """Replace the page at ``path`` in one step, because a web server may be serving it. Raises OSError."""
    made = page(report).encode()
    with replacing(path) as out:
        out.write(made)


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("delayer.audit"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["code"] = _code
    environment.globals |= {helper.__name__: helper for helper in _HELPERS}
    return environment.get_template("report.html")


def _code(text: str) -> Markup:
    """Mark up text in backticks as code; escape everything."""
    parts = [escape(part) for part in text.split("`")]
    return Markup("").join(Markup(f"<code>{part}</code>") if n % 2 else part for n, part in enumerate(parts))


class Chart(NamedTuple):
    """Bars over time. ``told``: the chart's content as text. ``first``, ``last``: labels at the ends of the axis."""

    title: str
    told: str
    first: str
    last: str
    svg: Markup


def _charts(report: AuditReport) -> Iterator[Chart]:
    at = report.calendar
    for title, bars in (("Due per minute", at.minutes), ("Due per hour", at.hours), ("Due per day", at.days)):
        some = sorted((bar for bar in bars if bar.messages), key=lambda bar: bar.start_ms)
        if some:
            yield chart(title, some, report.store_now_ms)


def _past_charts(past: Past) -> Iterator[Chart]:
    """Chart the releases and lateness of each hour, and the lateness of the largest routes."""
    series = [("Released per hour", past.hours, "released"), ("Held per hour", past.hours, "held")]
    series += [("Lateness per hour, p99", past.hours, "p99_ms")]
    routes = past.routes[:LATE_ROUTES] if len(past.routes) > 1 else ()
    series += [(f"Lateness of {words.name(one['route'], 'no route')}", one["hours"], "p99_ms") for one in routes]
    for title, hours, of in series:
        bars = [Bar(one["start_ms"], HOUR_MS, one[of], 0) for one in hours]
        if any(bar.messages for bar in bars):
            yield chart(title, bars, bars[0].start_ms, say=words.late if of == "p99_ms" else "{:,}".format)


def chart(title: str, bars: Sequence[Bar], now_ms: int, say: Callable[[int], str] = "{:,}".format) -> Chart:
    """Draw at most ROOM bars, each as high as its highest slot, so peaks stay visible. ``say`` formats a value."""
    width, start = bars[0].width_ms, bars[0].start_ms
    slots = (bars[-1].start_ms - start) // width + 1
    together = -(-slots // ROOM)
    heights: dict[int, int] = {}
    unread = set()
    for bar in bars:
        slot = (bar.start_ms - start) // width // together
        heights[slot] = max(heights.get(slot, 0), bar.messages)
        if bar.unread:
            unread.add(slot)
    top = max(bars, key=lambda bar: bar.messages)
    late = (now_ms - start) // width // together  # This slot and later slots are not over yet.
    paths = {"--bad": "", "--warn": "", "--bar": ""}
    for slot, messages in sorted(heights.items()):
        paths["--bad" if slot < late else "--warn" if slot in unread else "--bar"] += (
            f"M{slot} 100V{100 - 100 * messages / top.messages:.1f}h.9V100z"
        )
    drawn = Markup("").join(
        Markup('<path fill="var({})" d="{}"/>').format(colour, path) for colour, path in paths.items() if path
    )
    view = Markup('<svg viewBox="0 0 {} 100" preserveAspectRatio="none">{}</svg>')
    unit = words.width(width)
    told = f"the most in one {unit}: {say(top.messages)} on {instant(top.start_ms)}"
    if together > 1:
        told += f"; each bar is the busiest {unit} of {together}"
    ends = instant(start), instant(bars[-1].start_ms)
    return Chart(title, told, *ends, view.format(max(-(-slots // together), 8), drawn))


def _off(lane: LaneFigures) -> int:
    """Count the messages missing (negative) or surplus by the law of conservation."""
    return lane.waiting - waiting_of({**lane.counters, "held": lane.held})
