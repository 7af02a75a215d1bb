"""The audit as one page without scripts and requests. It can be read offline, on paper and on a telephone.

Exchanges, keys and routes come over AMQP, so their bytes are not ours. ``words.name`` removes everything that does not
print, the template escapes the rest, and the page's policy forbids scripts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from delayer import __version__
from delayer.audit import words
from delayer.audit.findings import Bar, LaneFigures, Report, Share
from delayer.audit.words import advice
from delayer.broker.route_check import Verdict
from delayer.core.files import replacing

KINDS: Final = ("parked", "restored", "released", "cancelled", "compacted")
_TONES: Final = {
    Verdict.ROUTED: ("good", "take them"),
    Verdict.ALTERNATE: ("warn", "use an alternate"),
    Verdict.MISSING: ("bad", "not find it"),
    Verdict.UNROUTABLE: ("bad", "find no queue"),
    Verdict.CLOSED: ("bad", "refuse them"),
    Verdict.DEPENDS: ("", "depends on headers"),
    Verdict.UNKNOWN: ("", "not known"),
    Verdict.NOT_ASKED: ("", "not asked"),
}
_HELPERS: Final = (
    "instant", "away", "duration", "size", "width", "change", "counted", "about", "name", "details",
    "behind", "sampled",
)  # fmt: skip


class Tile(NamedTuple):
    label: str
    value: str
    more: str = ""


class Tone(NamedTuple):
    """``tone`` is good, warn, bad or empty."""

    tone: str
    text: str


class Banner(NamedTuple):
    tone: str
    headline: str
    text: str


def page(report: Report) -> str:
    """The report as a page of HTML."""
    at = report.calendar
    most = max((one.messages for one in at.destinations), default=1)
    return _template().render(
        report=report,
        version=__version__,
        verdict=words.verdict(report),
        banner=_banner(report),
        tiles=list(_tiles(report)),
        groups=list(words.groups(report)),
        charts=list(_charts(report)),
        asked=words.name(next((run.skipped for run in report.rules if run.rule == "destinations"), ""), ""),
        # Destinations that would not take their messages stand first, even the smallest.
        destinations=sorted(at.destinations, key=lambda one: _badge(one).tone != "bad"),
        peaks=words.peaks(report),
        badges=_badge,
        share=lambda messages: 100 * messages / max(most, 1),
        off=_off,
        kinds=KINDS,
        advice=advice,
    )


def write(report: Report, path: Path) -> None:
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
    for helper in _HELPERS:
        environment.globals[helper] = getattr(words, helper)
    return environment.get_template("report.html")


def _code(text: str) -> Markup:
    """Text between backticks as code; all of it escaped."""
    parts = [escape(part) for part in text.split("`")]
    return Markup("").join(Markup(f"<code>{part}</code>") if n % 2 else part for n, part in enumerate(parts))


def _banner(report: Report) -> Banner:
    violations = sum(run.violations for run in report.rules)
    warnings = sum(run.warnings for run in report.rules)
    if violations:
        soonest = min((one.first_due_ms for one in report.violations if one.first_due_ms is not None), default=None)
        when = f" The first message that it is about is due {words.instant(soonest)}." if soonest is not None else ""
        return Banner("bad", words.verdict(report), f"Something is not as it must be.{when}")
    sampled = " in the sample" if report.sample is not None else ""
    text = f"Everything that came in{sampled} went out or is here, as far as it was checked."
    headline = f"No violations{sampled}"
    if warnings:
        return Banner("warn", f"{headline}, {words.counted(warnings, 'warning')}", text)
    return Banner("good", headline, text)


def _tiles(report: Report) -> Iterator[Tile]:
    totals = report.totals
    now_ms = report.store_now_ms
    everything = totals.waiting + totals.packed
    yield Tile("waiting", f"{everything:,}", f"{words.size(totals.size)} of content")
    if totals.segments:
        segments = words.counted(totals.segments, "segment")
        packed = f"{totals.packed:,} in {segments if report.sample is None else 'segments'}"
        yield Tile("of these compacted", f"{totals.packed / max(everything, 1):.0%}", packed)
        yield Tile("segments on disk", words.size(totals.packed_bytes))
    yield Tile("held", f"{totals.held:,}", "their destination did not take them" if totals.held else "")
    yield Tile("next due", *_instant_tile(totals.first_due_ms, now_ms))
    yield Tile("last due", *_instant_tile(totals.last_due_ms, now_ms))
    if totals.keyed:
        yield Tile("with a key", f"{totals.keyed:,}", "can be replaced or cancelled by it")
    worst = max(words.peaks(report), key=lambda peak: peak.drain_seconds, default=None)
    if worst is not None and worst.drain_seconds >= 1:
        more = f"{worst.messages:,} within one {words.width(worst.width_ms)}"
        yield Tile("longest to drain", words.duration(worst.drain_seconds), f"{more}, {words.instant(worst.start_ms)}")


def _instant_tile(at_ms: int | None, now_ms: int) -> tuple[str, str]:
    if at_ms is None:
        return "–", "nothing waits"
    return words.away(at_ms, now_ms), words.instant(at_ms)


class Chart(NamedTuple):
    """Bars over time. ``told``: the same in words. ``first``, ``last``: the labels at the ends of the axis."""

    title: str
    told: str
    first: str
    last: str
    svg: Markup


def _charts(report: Report) -> Iterator[Chart]:
    at = report.calendar
    for title, bars in (("Due per minute", at.minutes), ("Due per hour", at.hours), ("Due per day", at.days)):
        some = sorted((bar for bar in bars if bar.messages), key=lambda bar: bar.start_ms)
        if some:
            yield chart(title, some, report.store_now_ms)


def chart(title: str, bars: Sequence[Bar], now_ms: int, room: int = 240) -> Chart:
    """A chart of at most ``room`` bars. Each bar shows the highest value of its slots, so that no peak is lost."""
    width, start = bars[0].width_ms, bars[0].start_ms
    slots = (bars[-1].start_ms - start) // width + 1
    together = -(-slots // room)
    heights: dict[int, int] = {}
    for bar in bars:
        slot = (bar.start_ms - start) // width // together
        heights[slot] = max(heights.get(slot, 0), bar.messages)
    top = max(bars, key=lambda bar: bar.messages)
    late = (now_ms - start) // width // together  # This slot and the later ones are not over yet.
    paths = {"--bad": "", "--bar": ""}
    for slot, messages in sorted(heights.items()):
        paths["--bad" if slot < late else "--bar"] += f"M{slot} 100V{100 - 100 * messages / top.messages:.1f}h.9V100z"
    drawn = Markup("").join(
        Markup('<path fill="var({})" d="{}"/>').format(colour, path) for colour, path in paths.items() if path
    )
    view = Markup('<svg viewBox="0 0 {} 100" preserveAspectRatio="none">{}</svg>')
    unit = words.width(width)
    told = f"the most in one {unit}: {top.messages:,} on {words.instant(top.start_ms)}"
    if together > 1:
        told += f"; each bar is the busiest {unit} of {together}"
    ends = words.instant(start), words.instant(bars[-1].start_ms)
    return Chart(title, told, *ends, view.format(max(-(-slots // together), 8), drawn))


def _badge(share: Share) -> Tone:
    try:
        return Tone(*_TONES[Verdict(share.verdict)])
    except ValueError:  # The audit was made without asking, or by a newer version.
        return Tone("", share.verdict or "not asked")


def _off(lane: LaneFigures) -> int:
    """The number of messages that are missing (negative) or too many by the law of conservation."""
    counters = lane.counters
    came = counters["parked"] + counters["restored"]
    return counters["released"] + counters["cancelled"] + counters["compacted"] + lane.held + lane.waiting - came
