"""The audit log: messages that people changed by hand.

An act is written when it begins, with 0 messages. Its number grows in the transactions that change them. So the number
is exact after a crash as well.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import asyncpg

LONGEST: Final = 2_000
"""Characters of a request that are kept. Thousands of ids appear only as their number in ``messages``."""


class Act(NamedTuple):
    """One act. ``at_ms``: when it began, epoch ms; ``asked``: what for, as JSON."""

    id: int
    at_ms: int
    who: str
    verb: str
    messages: int
    asked: str


async def begin(connection: asyncpg.Connection, who: str, verb: str, asked: Mapping[str, Any]) -> int:
    """Write down that ``who`` begins to do ``verb``. Returns the act's id; raises the driver's errors."""
    text = json.dumps(asked or {"all": True}, ensure_ascii=True)
    if len(text) > LONGEST:
        text = json.dumps({"cut": text[:LONGEST]})
    number: int = await connection.fetchval(
        "INSERT INTO audit_log (who, verb, messages, asked) VALUES ($1, $2, 0, $3) RETURNING id", _kept(who), verb, text
    )
    return number


async def add(connection: asyncpg.Connection, act: int, messages: int) -> None:
    """It was done to that many more, in the open transaction. Raises the driver's errors."""
    if messages:
        await connection.execute("UPDATE audit_log SET messages = messages + $2 WHERE id = $1", act, messages)


async def listed(connection: asyncpg.Connection, limit: int, before: int | None = None) -> Sequence[Act]:
    """The latest first, from before the act ``before`` on. Raises the driver's errors."""
    rows = await connection.fetch(
        "SELECT id, at, who, verb, messages, asked FROM audit_log WHERE $2::bigint IS NULL OR id < $2"
        " ORDER BY id DESC LIMIT $1",
        limit,
        before,
    )
    return [Act(*row) for row in rows]


def _kept(text: str) -> str:
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()
