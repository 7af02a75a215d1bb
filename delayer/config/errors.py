"""Mistakes in a configuration. Their texts never show a secret."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from delayer.core.secret import concealed


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake: its source (a file, an environment variable or a flag), the key, expected, found."""

    source: str
    key: str
    expected: str
    found: str
    hint: str = ""

    def __str__(self) -> str:
        place = ": ".join(part for part in (self.source, self.key) if part)
        return f"{place}: expected {self.expected}, found {self.found}" + (f" ({self.hint})" if self.hint else "")


class ConfigError(Exception):
    """The configuration cannot be used. ``problems`` holds every mistake that was found, not only the first."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = tuple(problems)


class Expected(ValueError):
    """Raised by the validators of the model; the text completes the sentence "expected …"."""


def show(value: object, *, is_url: bool = False) -> str:
    """A found value as TOML or JSON would write it: shortened, printable, passwords masked.

    It does not show a text that is no URL in place of a URL: that may be a bare password.
    """
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if isinstance(value, str):
        if is_url and "://" not in value:
            return "a text that is no URL (not shown)" if value else '""'
        value = concealed(value)
    try:
        text = json.dumps(value)  # It escapes every character that could forge a line.
    except TypeError:
        text = str(value)  # A date or time of TOML.
    return text if len(text) <= 80 else text[:79] + "…"
