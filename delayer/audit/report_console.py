"""The audit on a terminal or in a journal: the findings, then the forecast, then the destinations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from delayer.audit import words
from delayer.audit.findings import AuditReport, Finding, Past
from delayer.core.readable import counted, duration, format_relative_time, instant, size

_STYLES: Final = {"good": "green", "warn": "yellow", "bad": "bold red", "": "dim"}


def show(report: AuditReport, console: Console) -> None:
    """Print ``report``. Names are never parsed as markup, and invisible characters never reach the terminal."""
    _findings(report, console)
    _coming(report, console)
    _destinations(report, console)
    if report.past is not None:
        _past(report.past, console)
    _verdict(report, console)


def _table(*columns: str, right: Iterable[int] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    numbers = set(right)
    for n, column in enumerate(columns):
        table.add_column(column, justify="right" if n in numbers else "left", overflow="fold")
    return table


def _indented(console: Console, table: Table) -> None:
    console.print(Padding(table, (0, 0, 1, 2)))


def _findings(report: AuditReport, console: Console) -> None:
    for severity, told, step, found, unlisted in words.groups(report):
        style = "bold red" if severity == "violation" else "yellow"
        console.print(Text.assemble((f"{counted(len(found), severity)}: ", style), (told.title, "bold")))
        # Print ten findings per rule. The page, the JSON and the Parquet files list the rest.
        for one in found[:10]:
            _finding(one, report.store_now_ms, console)
        if rest := len(found[10:]) + unlisted:
            console.print(Text(f"  … and {rest:,} more", "dim"))
        console.print(Text.assemble(("  Next: ", "bold"), step.replace("`", "")))
        console.print()


def _finding(one: Finding, now_ms: int, console: Console) -> None:
    line = Text.assemble("  ", (words.name(one.subject), "bold"), f"  {counted(one.count, 'message')}")
    if one.first_due_ms is not None:
        line.append(f", first due {instant(one.first_due_ms)} ({format_relative_time(one.first_due_ms, now_ms)})")
    console.print(line)
    if rows := [f"{label}: {text}" for label, text in words.details(one.details)]:
        console.print(Text("    " + "; ".join(rows), "dim"))


def _coming(report: AuditReport, console: Console) -> None:
    totals, now_ms = report.totals, report.store_now_ms
    console.print(Text("What is coming", "bold"))
    line = f"  {totals.waiting + totals.packed:,} wait"
    if totals.segments and report.sample is None:
        line += f" ({totals.packed:,} of them in {counted(totals.segments, 'segment')}"
        line += f" of {size(totals.packed_bytes)})"
    elif totals.segments:
        line += f" ({totals.packed:,} of them in segments)"
    line += f", {size(totals.size)} of content; {totals.held:,} held"
    console.print(Text(line))
    if totals.first_due_ms is not None:
        first, last = totals.first_due_ms, totals.last_due_ms
        text = f"  next due {instant(first)} ({format_relative_time(first, now_ms)})"
        console.print(Text(f"{text}, last {instant(last)} ({format_relative_time(last, now_ms)})"))
    if unread := words.unread(report):
        console.print(Text(f"  {unread}", "yellow"))
    console.print()
    if peaks := words.peaks(report):
        rate = f"to drain at {report.calendar.release_rate:,.0f}/s"
        table = _table("peak from", "within one", "messages", rate, right=(2, 3))
        for peak in peaks[:5]:
            slow = peak.drain_seconds > peak.width_ms / 1000
            drain = Text(duration(peak.drain_seconds), "yellow" if slow else "")
            table.add_row(instant(peak.start_ms), words.width(peak.width_ms), f"{peak.messages:,}", drain)
        _indented(console, table)


def _destinations(report: AuditReport, console: Console) -> None:
    at = report.calendar
    if not at.destinations:
        return
    table = _table("destination", "messages", "first due", "broker's verdict", right=(1,))
    for one in words.destinations(report)[:12]:
        verdict = Text(one.verdict, _STYLES[words.tone(one)])
        if one.way:
            verdict.append(f" ({words.name(one.way)})", "dim")
        table.add_row(
            Text(words.destination(one.to_exchange, one.to_key)),
            f"{one.messages:,}",
            instant(one.first_due_ms),
            verdict,
        )
    if rest := len(at.destinations[12:]) + at.destinations_more:
        table.add_row(Text(f"… and {rest:,} more", "dim"))
    _indented(console, table)


def _past(past: Past, console: Console) -> None:
    whole = past.whole
    console.print(Text("What was", "bold"))
    told = ", ".join(f"{whole[what]:,} {what}" for what in ("released", "held", "cancelled"))
    console.print(Text(f"  {instant(past.first_ms)} to {instant(past.last_ms)}: {told}"))
    table = _table("route", "released", "held", "late: p50", "p99", "max", right=(1, 2, 3, 4, 5))
    for one in past.routes[:5]:
        figures = one["whole"]
        late = (words.late(figures[name]) for name in ("p50_ms", "p99_ms", "worst_ms"))
        table.add_row(Text(words.name(one["route"], "-")), f"{figures['released']:,}", f"{figures['held']:,}", *late)
    _indented(console, table)
    table = _table("within one", "most released", "most to come", right=(1, 2))
    for width in past.capacity:
        counts = (f"{bar.messages:,}" if bar else "-" for bar in (width["released"], width["coming"]))
        table.add_row(words.width(width["width_ms"]), *counts)
    _indented(console, table)
    if past.worse:
        table = _table("destination that got worse", "held", "before", "late: p99", "before", right=(1, 2, 3, 4))
        for bad in past.worse[:10]:
            shares = f"{bad['held_now']:.1%}", f"{bad['held_before']:.1%}"
            nines = words.late(bad["p99_now_ms"]), words.late(bad["p99_before_ms"])
            table.add_row(Text(words.destination(bad["to_exchange"], bad["to_key"]), "yellow"), *shares, *nines)
        _indented(console, table)
    if past.odd:
        table = _table("delays that look wrong", "messages", "of", "delay", "usual on the route", right=(1, 2, 3, 4))
        for odd in past.odd[:10]:
            delays = words.late(odd["odd_ms"]), words.late(odd["usual_ms"])
            where = Text(words.destination(odd["to_exchange"], odd["to_key"]), "yellow")
            table.add_row(where, f"{odd['odd']:,}", f"{odd['messages']:,}", *delays)
        _indented(console, table)


def _verdict(report: AuditReport, console: Console) -> None:
    for run in report.rules:
        if run.skipped:
            console.print(Text(f"{words.advice(run.rule).title}, not checked: {words.name(run.skipped)}", "dim"))
    if behind := words.behind(report):
        console.print(Text(behind, "yellow"))
    if sampled := words.sampled(report):
        console.print(Text(sampled.replace("`", ""), "yellow"))
    sign, style = ("✗", "bold red") if report.violations else ("✓", "bold green")
    line = Text.assemble((f"{sign} {words.verdict(report)}", style))
    line.append(f"  ({instant(report.store_now_ms)}, took {duration(report.seconds)})", "dim")
    console.print(line)
