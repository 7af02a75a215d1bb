"""The audit log: messages changed by hand. An entry is written when the change begins, with 0 messages. The
transactions that change messages also raise this number, so it is exact even after a crash."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from asyncpg import Connection

LONGEST: Final = 2_000
"""Maximum number of characters kept of a request. Thousands of ids appear only as their number in ``messages``."""


class AuditEntry(NamedTuple):
    """One change by an operator. ``at_ms``: when it began, epoch ms; ``asked``: the request, as JSON."""

    id: int
    at_ms: int
    who: str
    verb: str
    messages: int
    asked: str


async def begin(connection: Connection, who: str, verb: str, asked: Mapping[str, Any]) -> int:
    """Record that ``who`` begins to do ``verb``. Returns the entry's id. Raises the driver's errors."""
    text = json.dumps(asked or {"all": True}, ensure_ascii=True)
    if len(text) > LONGEST:
        text = json.dumps({"cut": text[:LONGEST]})
    number: int = await connection.fetchval(
        "INSERT INTO audit_log (who, verb, messages, asked) VALUES ($1, $2, 0, $3) RETURNING id", _kept(who), verb, text
    )
    return number


async def add(connection: Connection, log_id: int, messages: int) -> None:
    """Add to the entry's count, in the open transaction. Raises the driver's errors."""
    if messages:
        await connection.execute("UPDATE audit_log SET messages = messages + $2 WHERE id = $1", log_id, messages)


async def list_entries(connection: Connection, limit: int, before: int | None = None) -> Sequence[AuditEntry]:
    """The latest entries before the entry ``before``, newest first. Raises the driver's errors."""
    rows = await connection.fetch(
        "SELECT id, at, who, verb, messages, asked FROM audit_log WHERE $2::bigint IS NULL OR id < $2"
        " ORDER BY id DESC LIMIT $1",
        limit,
        before,
    )
    return [AuditEntry(*row) for row in rows]


def _kept(text: str) -> str:
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()
