"""The figures of docs/guarantees.md are those of the soak beside it."""

from __future__ import annotations

import json

import pytest

from tests.faults.kinds import KINDS
from tests.soak.page import BEGIN, END, FIGURES, KEPT, PAGE, filled, rendered

SOAK = {name: 1000 * at for at, (name, _) in enumerate(FIGURES)} | {
    "begun": "2026-01-02 03:04 UTC",
    "minutes": 10.0,
    "seed": 5,
    "rabbitmq": "3.10.8",
    "published_in_mode": {"store": 5},
    "largest_daemon_mb": 90.4,
    "faults": {"store killed": 4, "daemon killed": 12},
    "kept": True,
}


def test_the_page_has_the_soak_that_lies_beside_it() -> None:
    assert filled(PAGE.read_text(), json.loads(KEPT.read_text())) == PAGE.read_text()


def test_what_stood_there_before_is_replaced() -> None:
    page = filled(f"before\n{BEGIN}what stood there\n{END}after\n", SOAK)
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert "what stood there" not in page
    assert "| lost | 3,000 |" in page
    assert "daemon killed 12, store killed 4." in page
    assert filled(page, SOAK) == page


def test_a_broken_promise_is_said() -> None:
    assert "A PROMISE BROKE" in rendered(SOAK | {"kept": False})
    assert "A PROMISE BROKE" not in rendered(SOAK)


def test_what_was_not_injected_and_the_share_of_each_mode_are_said() -> None:
    page = rendered(SOAK | {"published_in_mode": {"store": 900_000, "native": 100_000}})
    assert "900,000 (90.0%) in store mode and 100,000 (10.0%) in native mode were published" in page
    left_out = page.partition("Not injected: ")[2].partition(".")[0].split(", ")
    assert set(left_out) == KINDS.keys() - {"store killed", "daemon killed"}
    assert "Not injected: none." in rendered(SOAK | {"faults": dict.fromkeys(KINDS, 1)})


def test_a_page_without_the_place_is_no_page() -> None:
    with pytest.raises(ValueError, match="expected"):
        filled("nothing\n", SOAK)
