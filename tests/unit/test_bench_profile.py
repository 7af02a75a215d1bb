"""What a sample of py-spy counts for."""

from __future__ import annotations

import pytest

from bench.profile import REST, part_of, shares

LOOP = "main (delayer/cli.py:151);run (delayer/ops/loop.py:33)"


@pytest.mark.parametrize(
    ("inside", "part"),
    [
        ("", REST),
        (";tick (delayer/services/release.py:131)", "releasing"),
        (";tick (delayer/services/release.py:131);get_loop (asyncio/events.py:20)", "asyncio"),
        (";tick (delayer/services/release.py:131);sorted (<built-in>)", "releasing"),
        (";run (delayer/services/session.py:80);fetch (asyncpg/connection.py:3)", "asyncpg"),
        (";run (delayer/services/session.py:80)", "intake, and carrying out"),
        (";decide (delayer/services/dispatch.py:9)", "reading delays, choosing, editing"),
        (";of (delayer/core/delay.py:9)", "reading delays, choosing, editing"),
        (";data (delayer/wire/connection.py:9);split (delayer/wire/framing.py:1)", "messages to and from bytes"),
        (";data (delayer/wire/connection.py:9)", "connections to the broker"),
        (";publish (delayer/broker/publisher.py:9)", "connections to the broker"),
        (";copy (delayer/store/copying.py:9)", "rows and statements"),
    ],
)
def test_the_innermost_known_function_counts(inside: str, part: str) -> None:
    assert part_of(LOOP + inside) == part


def test_shares() -> None:
    lines = [f"{LOOP} 30", f"{LOOP};tick (delayer/services/release.py:131) 60", f"{LOOP};other (x.py:1) 10"]
    assert shares(lines) == {"releasing": 60, REST: 40}
    with pytest.raises(ValueError, match="nothing"):
        shares([])
