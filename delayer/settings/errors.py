"""What is wrong with a configuration: every problem, and nothing secret in any of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from delayer.settings.secret import concealed

_LONGEST_FOUND = 80


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake: where it stands (a file, an environment variable or a flag), which key, expected, found."""

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

    A text that stands where a URL should, and is none, is not shown at all: it may be a bare password.
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
        text = json.dumps(value)  # escapes every character that could forge a line of its own
    except TypeError:
        text = str(value)  # TOML's dates and times
    return text if len(text) <= _LONGEST_FOUND else text[: _LONGEST_FOUND - 1] + "…"
