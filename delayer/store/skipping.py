"""Moving the numbers of messages on, past any that this store may have given and does not remember.

A message's number leaves as its ``x-delayer-id``, by which consumers know copies. A store that is older than what was
released out of it (a backup, a standby that lagged) would give the numbers of messages that went out since to new ones.
"""

from __future__ import annotations

from typing import Final

from delayer.store import schema, session
from delayer.store.errors import translated

FAR: Final = 1_000_000_000
"""More than any store gives while a backup or a standby is behind, and nothing beside the 2^63 that there are."""


# Changes nothing, and keeps all others from taking numbers until it is committed: what they took between the asking and
# the setting would be given once more. There is no LOCK for sequences.
_ALONE: Final = "ALTER SEQUENCE message_id NO CYCLE"


async def skip_ids(url: str, by: int) -> int:
    """Leave out ``by`` numbers; the number that the next message gets at the least. Safe beside daemons, and to repeat.

    Raises StoreLost, BadStoreUrl, SchemaOutdated.
    """
    connection = await session.connect(url, "delayer skip-ids")
    try:
        with translated("move the ids on"):
            await schema.check(connection)
            async with session.transaction(connection):
                await connection.execute(_ALONE)
                last: int = await connection.fetchval("SELECT setval('message_id', nextval('message_id') + $1)", by)
            return last + 1
    finally:
        await session.close(connection)
