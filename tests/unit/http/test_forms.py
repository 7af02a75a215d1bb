"""Forms: the text in a field, and the resulting value."""

from __future__ import annotations

import pytest

from delayer.core import readable
from delayer.core.filters import Filter, place_text
from delayer.http.forms import (
    FieldError,
    Trail,
    back,
    instant,
    later,
    meant,
    number,
    place,
    searched,
    token,
    with_absolute_times,
)

NOW = 1_800_000_000_000
HOUR = 3_600_000


@pytest.mark.parametrize(
    ("form", "wanted"),
    [
        ({}, Filter()),
        ({"route": "  ", "key": ""}, Filter()),
        ({"route": "in", "to_exchange": "out", "to_key": "k"}, Filter(route=b"in", to_exchange=b"out", to_key=b"k")),
        ({"to_exchange": "amq.default", "to_key": "q"}, Filter(to_exchange=b"", to_key=b"q")),
        ({"key": "café"}, Filter(key="café".encode())),
        ({"header": "customer=47=11"}, Filter(headers=((b"customer", "47=11"),))),
        ({"due_after": "2h", "due_before": "2027-01-15T09:00Z"},
         Filter(due_from_ms=NOW + 2 * HOUR, due_before_ms=NOW + HOUR)),
    ],
    ids=range(7),
)  # fmt: skip
def test_filters(form: dict[str, str], wanted: Filter) -> None:
    assert searched(form, NOW).wanted == wanted


@pytest.mark.parametrize(
    ("text", "at_ms"),
    [
        ("2h", NOW + 2 * HOUR),
        ("+2h", NOW + 2 * HOUR),
        ("-30m", NOW - HOUR // 2),
        ("2027-01-15T08:00:00Z", NOW),
        ("2027-01-15T08:00", NOW),
        ("2027-01-15", NOW - 8 * HOUR),
        ("2027-01-15T09:00:00+01:00", NOW),
        ("2027-01-15T08:00:00.0001Z", NOW + 1),
    ],
)
def test_instants(text: str, at_ms: int) -> None:
    assert instant(text, NOW, "Due") == at_ms


@pytest.mark.parametrize(("text", "by_ms"), [("30m", HOUR // 2), ("+30m", HOUR // 2), ("-1h", -HOUR)])
def test_a_shift_is_read(text: str, by_ms: int) -> None:
    assert later(text) == by_ms


@pytest.mark.parametrize(
    ("form", "wanted"),
    [
        ({"all": ["yes"]}, Filter()),
        ({"route": ["in"]}, Filter(route=b"in")),
        ({"route": [""]}, Filter(route=b"")),
        ({"to_exchange": [" "], "to_key": ["q"]}, Filter(to_exchange=b"", to_key=b"q")),
        ({"due_before": ["1h"], "verb": ["cancel"]}, Filter(due_before_ms=NOW + HOUR)),
    ],
    ids=range(5),
)
def test_the_change_of_all_matching_messages(form: dict[str, list[str]], wanted: Filter) -> None:
    assert meant(form, NOW).wanted == wanted


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"verb": ["cancel"], "confirmed": ["yes"]},
        *({name: [""]} for name in ("key", "due_before", "header")),
        {"due_before": [""], "route": ["in"]},
        {"all": ["true"]},
        {"all": ["yes"], "route": ["in"]},
        {"route": ["in", "other"]},
        *({name: ["x"]} for name in ("rout", "due-before", "routing_key", "exchange", "")),
    ],
    ids=str,
)
def test_a_mistyped_form_is_refused(form: dict[str, list[str]]) -> None:
    with pytest.raises(FieldError):
        meant(form, NOW)


@pytest.mark.parametrize("text", ["soon", "", "2", "2027-13-01", "<script>", "99999d"])
def test_an_invalid_instant_is_reported(text: str) -> None:
    with pytest.raises(FieldError, match="Due: expected an instant"):
        instant(text, NOW, "Due")


@pytest.mark.parametrize("form", [{"header": "x"}, {"header": "=x"}, {"rout": "x"}], ids=str)
def test_an_invalid_filter_is_reported(form: dict[str, str]) -> None:
    with pytest.raises(FieldError, match=r'NAME=VALUE|Unknown field "rout"; did you mean "route"\? Expected one of'):
        searched(form, NOW)


def test_a_filter_with_relative_times_selects_the_same_messages_later() -> None:
    first = searched({"due_after": "-1h", "due_before": "2h", "key": "k"}, NOW)
    again = meant({name: [text] for name, text in with_absolute_times(first).items()}, NOW + 7 * HOUR)
    assert again.wanted == first.wanted


@pytest.mark.parametrize("at_ms", [0, NOW, NOW + 7, -1, -62_135_596_800_000, 253_402_300_799_999])
def test_instants_are_read_as_they_are_written(at_ms: int) -> None:
    assert instant(readable.instant(at_ms, exact=True), NOW, "Due") == at_ms


def test_the_trail_of_pages() -> None:
    assert Trail.of({}) == ((), "")
    assert Trail.of({"after": "5.1"}) == (None, "5.1"), "a link of a program, or of a page that ended at its limit"
    query: dict[str, str] = {}
    for after in ("1.1", "2.2", "3.3"):
        query = Trail.of(query).next(after, full=True)
    assert query == {"after": "3.3", "trail": "-,1.1,2.2"}
    assert Trail.of(query).numbers(7, 50) == (151, 157)
    assert Trail.of(query).next("4.4", full=False) == {"after": "4.4", "trail": ""}
    back = Trail.of(query).previous
    assert back == {"after": "2.2", "trail": "-,1.1"}
    assert Trail.of(back).previous == {"after": "1.1", "trail": "-"}
    assert Trail.of({"after": "1.1", "trail": "-"}).previous == {"after": "", "trail": ""}
    assert Trail.of({}).previous is None
    assert Trail.of({"after": "5.1"}).numbers(7, 50) is None
    for n in range(200):
        query = Trail.of(query).next(f"{n}.0", full=True)
    assert len(query["trail"]) < 4_000, "a URL stays short"


def test_ids_and_pages() -> None:
    assert token("id:7@5") == (7, 5)
    assert place("") is None
    assert place(place_text((5, -1))) == (5, -1)
    assert (number(""), number("17")) == (None, 17)
    for text in ("x", "1", "1.x", "1.2.3", "9" * 19 + ".1", "1." + "9" * 19, "9" * 5000 + ".1", "\u0663.1"):
        with pytest.raises(FieldError):
            place(text)
    for text in ("x", "-1", "\u0663", "' OR 1=1", "1@9999999999999999", "1@-999999999999999", "9" * 19, "9" * 5000):
        with pytest.raises(FieldError):
            token(f"id:{text}")
        with pytest.raises(FieldError):
            number(text)
    with pytest.raises(FieldError, match=r'id: expected an id .* such as id:48213@1795291200000.*found "7@5"'):
        token("7@5")


@pytest.mark.parametrize(
    ("wish", "path"),
    [
        ("/held", "/held"),
        ("/waiting?route=in", "/waiting?route=in"),
        ("", "/waiting"),
        ("//evil.example", "/waiting"),
        ("/\\evil.example", "/waiting"),
        ("/\t/evil.example", "/waiting"),
        ("https://evil.example", "/waiting"),
    ],
)
def test_a_form_redirects_only_to_paths_of_this_server(wish: str, path: str) -> None:
    assert back({"back": [wish]}, "/waiting") == path
