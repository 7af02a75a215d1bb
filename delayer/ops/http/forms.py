"""Forms as they come in: read whole, and no larger than the guard lets in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import parse_qs

from starlette.requests import Request

from delayer.core.filters import Token
from delayer.ops.http import asked
from delayer.ops.http.asked import Wrong

MOST: Final = 1_000
"""Messages that one form names."""


async def said(request: Request) -> dict[str, list[str]]:
    """The fields of a form. Raises Wrong."""
    if not request.headers.get("content-type", "").startswith("application/x-www-form-urlencoded"):
        raise Wrong("Expected a form (application/x-www-form-urlencoded).")
    try:
        return parse_qs((await request.body()).decode(), keep_blank_values=True, max_num_fields=MOST + 20)
    except ValueError as error:
        raise Wrong(f"Expected a form: {error}") from None


def verb(form: Mapping[str, Sequence[str]], *allowed: str) -> str:
    """What is to be done. Raises Wrong."""
    found = form.get("verb", [""])[0]
    if found not in allowed:
        raise Wrong(f"Verb: expected one of {', '.join(allowed)}, found {found[:40]!r}")
    return found


def ids(form: Mapping[str, Sequence[str]]) -> list[str]:
    """Which messages are chosen, each once. Raises Wrong."""
    found = list(dict.fromkeys(form.get("id", [])))
    if not found:
        raise Wrong("Choose at least one message.")
    if len(found) > MOST:
        raise Wrong(f"At most {MOST} messages at once; use a filter, or the command line.")
    return found


def tokens(form: Mapping[str, Sequence[str]]) -> list[Token]:
    """The same, as names of messages. Raises Wrong."""
    return [asked.token(text) for text in ids(form)]


def back(form: Mapping[str, Sequence[str]], path: str) -> str:
    """Where a form wants to go on: a path of ours, and nobody else's. Without a wish: the list that it belongs to."""
    wish = form.get("back", [""])[0]
    list_of = {"/deeds/held": "/held", "/deeds/refused": "/refused"}.get(path, "/waiting")
    return wish if wish.startswith("/") and not wish.startswith(("//", "/\\")) else list_of
