"""The audit on a console and as a page: complete, and safe with other people's bytes."""

from __future__ import annotations

import dataclasses
import html.parser
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from delayer.audit import report_console, report_html, words
from delayer.audit.findings import AuditReport, Bar, Calendar, Finding, LaneFigures, Past, Peak, RuleRun, Totals
from tests.unit.audit import audit_reports
from tests.unit.audit.audit_reports import HOUR, NOW_MS

FULL, EMPTY = audit_reports.full(), audit_reports.empty()


def lines(report: AuditReport) -> list[str]:
    """The report as plain lines."""
    console = Console(width=120, no_color=True, highlight=False, force_terminal=False, legacy_windows=False)
    with console.capture() as capture:
        report_console.show(report, console)
    return [line.rstrip() for line in capture.get().splitlines()]


class Parsed(html.parser.HTMLParser):
    """All tags of a page with their attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def page() -> str:
    return report_html.page(FULL)


@pytest.mark.parametrize("report", [FULL, EMPTY, replace(FULL, sample=0.01)], ids=["full", "empty", "sample"])
def test_the_page_loads_runs_and_sends_nothing(report: AuditReport) -> None:
    page = report_html.page(report)
    parsed = Parsed(page)
    assert parsed.open == [], "every element is closed"
    names = {tag for tag, _ in parsed.tags}
    assert not names & {"script", "iframe", "object", "embed", "img", "image", "form", "base", "audio", "video"}
    for tag, attributes in parsed.tags:
        assert not [name for name in attributes if name.startswith("on")], tag
        for name in ("src", "srcset", "action", "data", "poster", "background"):
            assert name not in attributes, tag
        for name in ("href", "xlink:href"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:,")), (tag, value)
    assert not re.search(r"url\((?!#)", page), "no style loads a file"
    assert "@import" not in page
    policy = next(a["content"] for _, a in parsed.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; img-src data:;")


def test_hostile_names_are_text(page: str) -> None:
    text = Parsed(page).text
    assert "<script>document.title='owned'</script>" in text
    assert r"nul\x00and\x1b[31mescape\nnew line" in text
    assert r"\xff\xfe not UTF-8 \xc3" in text
    assert r"\u202eright to left, ünïcödé {{ 7 * 7 }} {% raw %} [bold]markup[/]" in text
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202e]", page)


def test_ids_are_unique(page: str) -> None:
    ids = [attributes["id"] for _, attributes in Parsed(page).tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)"', page)) | set(re.findall(r"url\(#([^)]+)\)", page)) <= set(ids)


def test_the_report_of_an_empty_store_has_no_violations() -> None:
    text = Parsed(report_html.page(EMPTY)).text
    assert "No violations" in text
    assert "Nothing waits." in text
    assert report_html.page(EMPTY) == report_html.page(EMPTY), "the same report gives the same page"


def test_the_report_of_a_sample_judges_no_sums() -> None:
    text = Parsed(report_html.page(replace(FULL, sample=0.01))).text
    assert "A sample: about 1 % of the pages, with " in text
    assert "held messages, segments and counters are all of them" in text
    assert "off by" not in text


def test_the_console_shows_the_whole_report() -> None:
    told = lines(FULL)
    text = "\n".join(told)
    assert told[0] == "1 violation: Conservation"
    assert told[-1].startswith("✗ 9 violations, 15 warnings")
    assert all(line.isprintable() for line in told), "no escape sequence, no NUL"
    assert "[bold]markup[/]" in text, "names are not read as markup"
    assert "7,013,444 wait (2,000,000 of them in 204 segments of 212 MB)" in text
    assert "… and 12 more" in text, "findings that the report does not list"
    assert text.index("payments.eu · capture") < text.index("queue mail.inbox"), "missing destinations come first"
    assert lines(EMPTY)[-1].startswith("✓ 0 violations, 0 warnings")


def test_the_history_is_on_the_console_and_on_the_page(page: str) -> None:
    text, told = "\n".join(lines(FULL)), Parsed(page).text
    for shown in (text, told):
        assert "44,328 released, 94 held, 144 cancelled" in shown
        assert "payments.eu · capture" in shown
        assert "61 s" in shown, "the lateness of a destination that got worse"
        assert "3.6 s" in shown, "a delay of a thousandth"
        assert "4,200,000" in shown
    for title in ("Released per hour", "Held per hour", "Lateness per hour, p99", "Lateness of orders.in"):
        assert title in told
    assert "the most in one hour: 1.89 s on" in told
    assert "What was" not in Parsed(report_html.page(EMPTY)).text
    assert "What was" not in "\n".join(lines(EMPTY))


def test_a_second_with_one_message_is_no_peak_beside_thousands() -> None:
    calendar = replace(FULL.calendar, peaks=(*FULL.calendar.peaks, Peak(NOW_MS, 1000, 77, 1, 0.002)))
    report = replace(FULL, calendar=calendar)
    assert [peak.messages for peak in words.peaks(report)] == [4_200_000, 310_000, 2_020_000]
    short = replace(FULL, calendar=replace(calendar, peaks=(Peak(NOW_MS, HOUR, 13_999, 1, 0.999),)))
    assert words.peaks(short) == [], "it drains in less than a second"


def test_charts_keep_every_peak() -> None:
    """The chart joins thousands of bars to fit its width, and the highest keeps its height."""
    bars = [Bar(NOW_MS // HOUR * HOUR + n * HOUR, HOUR, 7_777 if n == 4_000 else 1, 0) for n in range(5_000)]
    chart = report_html.chart("x", bars, NOW_MS)
    assert "the most in one hour: 7,777" in chart.told
    assert chart.told.endswith("each bar is the busiest hour of 21")
    assert chart.svg.count("h.9") == 239
    assert f"M{4_000 // 21} 100V0.0h" in chart.svg


@pytest.mark.parametrize(
    "bars",
    [
        [Bar(NOW_MS, 60_000, 1, 0)],
        [Bar(0, 60_000, 1, 0), Bar(10**15, 60_000, 1, 0)],
        [Bar(-(10**15), 60_000, 1, 0), Bar(NOW_MS, 60_000, 10**12, 0)],
    ],
    ids=["one", "far apart", "beyond the calendar"],
)
def test_odd_calendars_are_drawn(bars: list[Bar]) -> None:
    assert report_html.chart("x", bars, NOW_MS).svg.startswith("<svg")


@pytest.mark.parametrize(("behind_ms", "told"), [(0, ""), (999, ""), (7_200_000, "Read from a replica 2 h behind its")])
def test_the_report_names_the_lag_of_a_replica(behind_ms: int, told: str) -> None:
    report = replace(FULL, behind_ms=behind_ms)
    for text in ("\n".join(lines(report)), report_html.page(report)):
        assert ("behind its primary" in text) == bool(told)
        assert told in text


def test_each_finding_stands_above_its_own_next_step() -> None:
    found = [Finding("integrity", "violation", f"lane {n}", 1, next=f"step `{n % 2}`") for n in range(4)]
    report = replace(EMPTY, findings=(*found, Finding("far-orders", "warning", "x", 1, next="ask the shop")))
    told = [line.strip() for line in lines(report)][:10]
    steps = [line for line in told if line.startswith(("lane", "Next", "x"))]
    assert steps[:6] == ["lane 0  1 message", "lane 2  1 message", "Next: step 0", "lane 1  1 message",
                         "lane 3  1 message", "Next: step 1"]  # fmt: skip
    page = report_html.page(report)
    assert page.count("<b>Next:</b>") == 3
    assert "far-orders" in page, "a rule of the user's has its name as its title"


def test_messages_of_segments_that_do_not_read_back_are_marked() -> None:
    day = Bar(NOW_MS + 86_400_000, 86_400_000, 10, 0, unread=7)
    report = replace(EMPTY, calendar=Calendar(14_000.0, days=(day,)))
    page = report_html.page(report)
    for text in ("\n".join(lines(report)), page):
        assert "7 messages in unreadable segments" in text
    assert 'fill="var(--warn)"' in page
    assert "in unreadable segments" not in report_html.page(EMPTY)


def test_the_page_names_every_field_of_the_report() -> None:
    text = (Path(__file__).parents[3] / "docs" / "backlog.md").read_text(encoding="utf-8")
    for kind in (AuditReport, Totals, LaneFigures, Calendar, RuleRun, Finding, Past):
        for field in dataclasses.fields(kind):
            name = "…_more" if field.name.endswith("_more") else field.name
            assert f"`{name}`" in text, f"{kind.__name__}.{field.name}"
    past = audit_reports.past()
    for row in (past.whole, past.routes[0], past.capacity[0], past.worse[0], past.odd[0]):
        assert [name for name in row.keys() - {"route"} if f"`{name}`" not in text] == []
