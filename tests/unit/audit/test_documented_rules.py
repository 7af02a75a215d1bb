"""docs/backlog.md prints the rules of the audit as SQL, as the audit runs them."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent
from typing import Any

from delayer.audit import rules

DOCUMENT = Path(__file__).parents[3] / "docs" / "backlog.md"
FOUND = re.compile(r"FROM \(SELECT \*, row_number\(\) .*? AS nth FROM \(\n?(.*)\)\)\n +WHERE subject", re.DOTALL)
"""The SQL that rules._found wraps around a rule's query."""


class Instant(str):
    """A name in the place of a number."""

    def __add__(self, other: object) -> str:
        return f"{self} + {other}"


class Printer:
    """A stand-in for an Extract that records the queries."""

    now_ms = Instant("now_ms")

    def __init__(self) -> None:
        self.queries: list[str] = []

    def rows(self, sql: str) -> list[Any]:
        inside = FOUND.search(sql)
        self.queries.append(dedent(inside[1] if inside else sql).strip())
        return []


def printed() -> str:
    told = []
    for rule, question in {
        rules.SEGMENTS: lambda store: rules.segments(store, "restored_ms"),
        rules.INTEGRITY: rules.integrity,
        rules.OVERDUE: lambda store: rules.overdue(store, [], {}),
        rules.REPEATS: rules.repeats,
        rules.KEYS: rules.keys,
    }.items():
        printer = Printer()
        question(printer)
        told += [f"-- {rule}\n{query};" for query in printer.queries]
    return "\n\n".join(told)


def test_the_document_has_the_queries() -> None:
    assert f"```sql\n{printed()}\n```" in DOCUMENT.read_text(encoding="utf-8")
