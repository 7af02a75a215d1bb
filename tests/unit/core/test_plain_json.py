"""JSON that any terminal may be shown: the same to whoever parses it, and nothing in it that does not print."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayer.cli.output import print_json
from delayer.core.lines import escaped


@pytest.mark.parametrize("character", ["\x7f", "\x9b", "\u202e", "\u2028", "\ud800", "\U000e0001", "\x1b"])
def test_invisible_characters_are_escaped(character: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"key": f"ä{character}☃"})
    shown = capsys.readouterr().out
    assert character not in shown
    assert "ä" in shown and "☃" in shown
    assert json.loads(shown) == {"key": f"ä{character}☃"}


@given(st.recursive(st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_it_means_the_same(value: object) -> None:
    plain = escaped(json.dumps(value, indent=2, ensure_ascii=False))
    assert json.loads(plain) == value
    assert all(one.isprintable() for one in plain.replace("\n", ""))
