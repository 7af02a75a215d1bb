"""Tables: one line for each row in a pipe, folded cells on a terminal, and complete text in both."""

from __future__ import annotations

import sys

import pytest

from delayer.cli.output import print_table

ROWS = [("1", "w" * 500, "x"), ("22", "日本" * 100, ""), ("3", "[red]x[/red] \x1b[2J", "  z ")]


def test_a_piped_table_has_one_line_for_each_row(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["id", "reason", ""], ROWS, right=(0,))
    assert capsys.readouterr().out.splitlines() == [
        "id  reason",
        f" 1  {'w' * 500}  x",
        f"22  {'日本' * 100}",
        f" 3  {chr(92).join(('[red]x[/red] ', 'x1b[2J')):500}    z",
    ]


def test_wide_characters_take_two_columns(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["a", "b"], [("日本", 1), ("x", 2)])
    assert capsys.readouterr().out.splitlines() == ["a     b", "日本  1", "x     2"]


def test_a_piped_table_can_be_empty(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["a", "b"], [])
    assert capsys.readouterr().out == "a  b\n"


def test_a_terminal_folds_cells_and_keeps_their_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_table(["id", "reason", ""], ROWS)
    out = capsys.readouterr().out
    assert out.count("w") == 500
    assert (out.count("日"), out.count("本")) == (100, 100)
    assert "[red]x[/red]" in out
    assert len(out.splitlines()) > 10
