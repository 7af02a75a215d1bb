"""Errors in a configuration. Their texts never show a secret."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from delayer.core.readable import TOO_LONG
from delayer.core.secret import concealed


@dataclass(frozen=True, slots=True)
class Problem:
    """One error: its source (a file, an environment variable or a flag), the key, the expected and the found value."""

    source: str
    key: str
    expected: str
    found: str
    hint: str = ""

    def __str__(self) -> str:
        place = ": ".join(part for part in (self.source, self.key) if part)
        return f"{place}: expected {self.expected}, found {self.found}" + (f" ({self.hint})" if self.hint else "")


class ConfigError(Exception):
    """The configuration is unusable. ``problems`` has every error found, not only the first."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = tuple(problems)


class Expected(ValueError):
    """Raised by the model's validators; the text completes the sentence "expected …"."""


LOOKED_AT: Final = 1 << 16
"""Characters of a value in which passwords are masked: more than the 80 that are shown, and than any password has. A
lower limit could cut a long one before the "@" that shows it as a password; both read it in one pass."""


def format_found(value: object, *, is_url: bool = False) -> str:
    """Show a found value as TOML or JSON would: shortened, printable, passwords masked. In place of a URL, other text
    is hidden, because it may be a bare password."""
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if isinstance(value, str):
        if is_url and "://" not in value:
            return "a text that is no URL (not shown)" if value else '""'
        value = concealed(value[:LOOKED_AT])
    try:
        text = json.dumps(value)  # It escapes every character that could forge a line.
    except TypeError:
        text = str(value)  # A date or time of TOML.
    except ValueError:
        text = TOO_LONG  # TOML may have it in hexadecimal.
    return text if len(text) <= 80 else text[:79] + "…"
