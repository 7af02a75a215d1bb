"""Forms as they come in: read whole, and no larger than the guard lets in."""

from __future__ import annotations

from typing import Final
from urllib.parse import parse_qs

from starlette.requests import Request

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
