"""What the log says about errors of the driver."""

from __future__ import annotations

import asyncpg

from delayer.store.errors import describe


def test_a_session_that_the_server_ended_is_named() -> None:
    """asyncpg says this if a statement begins after it has read the server's last error, and before the end."""
    raw = asyncpg.InternalClientError("cannot switch to state 12; another operation (2) is in progress")
    assert describe(raw).startswith("the server has ended this session")
    assert describe(asyncpg.InternalClientError("out of turn")) == "out of turn"
