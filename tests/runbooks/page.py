"""The place in docs/operations.md where what was seen goes: a block of code behind the runbook's mark. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence


def mark(name: str) -> str:
    return f"<!-- seen: {name} -->"


def written(page: str, name: str, lines: Sequence[str]) -> str:
    """The page with these lines in the block of this runbook. Raises ValueError if it has no such block, or two."""
    block = re.compile(re.escape(mark(name)) + r"\n```text\n.*?```\n", re.DOTALL)
    text = "\n".join([mark(name), "```text", *lines, "```", ""])
    new, count = block.subn(lambda _: text, page)
    if count != 1:
        raise ValueError(f"expected one block behind {mark(name)}, found {count}")
    return new
