"""The page: escaped values, visible characters, readable colours."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from delayer.http import render
from delayer.http.render import ENVIRONMENT
from delayer.store.admin.census import COMPACTED, Census, DestinationCount

NOW = 1_800_000_000_000
STATIC = Path(render.__file__).parent / "static"
TEMPLATES = Path(render.__file__).parent / "templates"


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        (b"orders.eu", "orders.eu"), (b"\xff\xfe", "\\xff\\xfe"), ("a\u202eb", "a\\u202eb"),
        ("a\x00\x1b[31m", "a\\u0000\\u001b[31m"), ("zero\u200bwidth", "zero\\u200bwidth"),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"), (None, ""),
    ],
)  # fmt: skip
def test_names_show_invisible_characters(raw: bytes | str | None, shown: str) -> None:
    assert render.name(raw) == shown


@pytest.mark.parametrize("template", sorted(TEMPLATES.glob("*.html")), ids=lambda path: str(path.name))
def test_templates_escape_every_value_and_run_no_inline_code(template: Path) -> None:
    text = template.read_text()
    assert not re.search(r"\|\s*safe|autoescape\s+false|Markup", text)
    assert not re.search(r"<script(?![^>]*\bsrc=)", text)
    assert not re.search(r"""\son\w+\s*=|\sstyle\s*=|javascript:|https?://|hx-on""", text)


def test_hostile_text_is_escaped_in_every_place() -> None:
    hostile = "\"><script>alert(1)</script>'"
    shown = render.html("done.html", heading=hostile, lines=[hostile], back=hostile, here="", session=None,
                        can_open=False, names={}, has_store=True, counts={},
                        notice=(hostile, [hostile])).body.decode()  # fmt: skip
    assert "<script>alert" not in shown
    assert shown.count("&lt;script&gt;alert(1)") == 6


def test_headers_are_shown_as_json() -> None:
    row = ENVIRONMENT.from_string("{{ value | value_text | name }}")
    assert [row.render(value=value) for value in ("a", True, None, {"b": "\u202e"}, [1, "<"])] == [
        "a", "true", "null", "{&#34;b&#34;: &#34;\\u202e&#34;}", "[1, &#34;&lt;&#34;]",
    ]  # fmt: skip


def test_instants_are_seconds_for_people_and_milliseconds_for_scripts() -> None:
    row = ENVIRONMENT.from_string('{% from "parts_times.html" import at %}{{ at(ms) }}')
    exact = "2027-01-15T08:00:00.250Z"
    assert row.render(ms=NOW + 250) == f'<time datetime="{exact}" title="{exact}">2027-01-15T08:00:00Z</time>'


def test_the_counts_include_routes_without_messages() -> None:
    census = Census(0, {(b"a", 0): 1.0, (b"a", 60): 2.0, (b"a", 61): 4.0, (b"b", 70): 9.0}, exact=True, held={b"c": 3})
    assert render.routes(census, [b"a", b"idle"]) == [
        (b"b", 9.0, 0, 0), (b"a", 7.0, 3.0, 0), (b"c", 0, 0, 3), (b"idle", 0, 0, 0),
    ]  # fmt: skip


def test_the_largest_destinations() -> None:
    many = {(b"x", b"%d" % n): DestinationCount(float(n), NOW, 0) for n in range(100)}
    held, none = (b"", b"q"), (b"y", b"")
    census = Census(0, {(b"a", 0): 5000.0, (COMPACTED, 9): 70.0}, True, {}, many | {held: DestinationCount(held=3)})
    rows = render.destinations(census, {none: 2.5})
    assert [row.waiting for row in rows[:20]] == [float(n) for n in range(99, 79, -1)]
    assert {(row.exchange, row.routing_key) for row in rows} > {held, none}
    assert len(rows) <= 2 * render.MOST_ROWS
    told = render.destinations_note(census, rows)
    assert "70 compacted messages are not counted here." in told
    others = 5000 - sum(row.waiting for row in rows)
    assert f"{render.number(others)} messages wait for other destinations." in told


def colours(dark: bool) -> dict[str, str]:
    css = (STATIC / "delayer.css").read_text()
    light, _, rest = css.partition("@media (prefers-color-scheme: dark)")
    return dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", rest if dark else light))


def luminance(colour: str) -> float:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


TEXTS = [
    ("ink", "ground"), ("ink", "paper"), ("dim", "ground"), ("dim", "paper"), ("link", "ground"), ("link", "paper"),
    ("on-button", "button"), ("on-danger", "danger"), ("on-alarm", "alarm"),
]  # fmt: skip
SHAPES = [("edge", "paper"), ("edge", "ground"), ("first", "paper"), ("second", "paper"), ("bar", "paper")]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize(("front", "back", "least"), [(*p, 4.5) for p in TEXTS] + [(*p, 3.0) for p in SHAPES])
def test_colours_can_be_told_apart(front: str, back: str, least: float, dark: bool) -> None:
    found = colours(dark)
    assert contrast(found[front], found[back]) >= least


def test_vendored_files_have_their_licence() -> None:
    for library in ("htmx", "uPlot"):
        assert "ermission" in (STATIC / f"{library}.LICENSE.txt").read_text()


@pytest.mark.parametrize(
    ("at_ms", "text"), [(NOW + 2_000, "in 2 s"), (NOW, "now"), (NOW - 2_000, "now"), (NOW - 30_000, "30 s ago")]
)
def test_what_comes_next_and_is_due_comes_now(at_ms: int, text: str) -> None:
    assert render.upcoming(at_ms, NOW) == text
