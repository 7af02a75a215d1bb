"""Tables that are laid out here look as rich would have made them, which takes over where they do not fit."""

from __future__ import annotations

import random
import string

import pytest

from delayer.commands import tables
from delayer.commands.output import print_table

WORDS = ["", "x", "lane", "2026-11-22 01:02:03Z (in 5m)", "[red]x[/red]", "a" * 30, "12", "  spaced  out"]


@pytest.mark.parametrize("seed", range(20))
def test_as_rich_would_have_made_it(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    chance = random.Random(seed)
    count = chance.randint(1, 5)
    columns = [
        chance.choice(["", "id", "next due", string.ascii_letters[: chance.randint(1, 12)]]) for _ in range(count)
    ]
    rows = [[chance.choice(WORDS) for _ in columns] for _ in range(chance.randint(0, 8))]
    right = frozenset(chance.sample(range(count), chance.randint(0, count)))
    lines = tables.laid_out(columns, rows, right, tables.WIDTH_WITHOUT_TERMINAL)
    assert lines is not None
    tables._folded(columns, rows, right)
    assert lines == [line.rstrip() for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("cell", "width", "fits"),
    [
        ("x" * 70, 80, True),
        ("x" * 71, 80, False),
        ("é", 80, False),
        ("日本", 80, False),
        ("", 10, False),
        ("", 11, True),
    ],
)
def test_what_is_left_to_rich(cell: str, width: int, fits: bool) -> None:
    assert (tables.laid_out(["a", "somewhat"], [(cell, "n")], (1,), width) is not None) is fits


def test_nothing_of_a_cell_is_lost_where_it_is_folded(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["id", "reason"], [("1", "w" * 500), ("2", "日本" * 100)])
    out = capsys.readouterr().out
    assert out.count("w") == 500
    assert out.count("日本") == 100
    assert max(map(len, out.splitlines())) <= tables.WIDTH_WITHOUT_TERMINAL
