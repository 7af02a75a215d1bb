"""The instant that a replica has come to, and with that the instant that an audit of it is about.

While it is connected to its primary and has replayed all that it received, that is now, however long ago the last
commit was. Otherwise it is that of the last commit that it replayed; or, where it has replayed none since its start, of
the checkpoint that it started from.

What it is connected to may be a replica itself, which is cut off, or behind: then all that it received says nothing. So
whoever sends is asked the same, up to the primary.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import asyncpg

from delayer.core.errors import StoreLost
from delayer.core.secret import SecretUrl
from delayer.store import session
from delayer.store.errors import DRIVER_ERRORS, BadStoreUrl

LONGEST_CHAIN: Final = 8
_UNSURE: Final = "if that is a replica itself and behind, what was released since may be called overdue"
CONNECT_SECONDS: Final = 5.0

# Who may not see the receiver's status sees that there is one, and not who sends. After a start a replica may have
# replayed more, from its own files, than it has received since.
_STATE: Final = """
SELECT pg_is_in_recovery() AS replica,
       floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint AS now_ms,
       NOT pg_is_in_recovery() OR pg_last_wal_receive_lsn() <= pg_last_wal_replay_lsn()
           AND coalesce((SELECT coalesce(status, 'streaming') = 'streaming' FROM pg_stat_wal_receiver), false)
           AS follows,
       floor(extract(epoch FROM coalesce(
           pg_last_xact_replay_timestamp(), (SELECT checkpoint_time FROM pg_control_checkpoint())
       )) * 1000)::bigint AS commit_ms,
       (SELECT sender_host FROM pg_stat_wal_receiver) AS host,
       (SELECT sender_port FROM pg_stat_wal_receiver) AS port
"""


class State(NamedTuple):
    """Of one server. ``follows``: it is a primary, or has replayed all that its sender gave it."""

    replica: bool
    now_ms: int
    follows: bool
    commit_ms: int
    host: str | None
    port: int | None


class Come(NamedTuple):
    """The instant (epoch ms by the server's clock); ``remark``: what is not known about it, for people."""

    at_ms: int
    remark: str = ""


async def come_to(connection: asyncpg.Connection, url: SecretUrl) -> Come:
    """What the server behind ``connection``, which ``url`` leads to, has come to. Raises the driver's errors."""
    here = await _state(connection)
    there, remark = here, ""
    for _ in range(LONGEST_CHAIN):
        if not there.follows:
            return Come(min(here.now_ms, here.commit_ms))
        if not there.replica:
            break
        if there.host is None:
            remark = f"this role may not see whom the replica follows (pg_read_all_stats): {_UNSURE}"
            break
        try:
            there = await _ask(url, there.host, there.port)
        except (*DRIVER_ERRORS, StoreLost, BadStoreUrl):
            remark = f"the replica follows {there.host}, which could not be asked whether it is the primary: {_UNSURE}"
            break
    return Come(here.now_ms, remark)


async def _state(connection: asyncpg.Connection) -> State:
    return State(*await connection.fetchrow(_STATE))


async def _ask(url: SecretUrl, host: str, port: int | None) -> State:
    """The state of who sends, with the same user, password and database."""
    connection = await asyncpg.connect(
        url.reveal(), host=host, port=port, timeout=CONNECT_SECONDS, command_timeout=CONNECT_SECONDS,
        server_settings=session.settings("delayer audit snapshot"),
    )  # fmt: skip
    try:
        return await _state(connection)
    finally:
        await session.close(connection)
