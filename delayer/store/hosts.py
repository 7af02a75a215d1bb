"""Opens a connection to a store whose URL names several hosts.

The driver has one deadline for all hosts of a URL. A host that does not answer at all, such as a machine without power,
would use it up, and the standby behind it would never be asked. So each host is asked by itself. Only the driver can
prefer a standby, because it has to compare the hosts: it then asks them one after another, with the one deadline.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import asyncpg
from asyncpg import Connection

from delayer.core.store_hosts import hosts_of, parameters_of

NEXT_HOST_SECONDS: Final = 1.0
"""After this time without an answer the next host is asked too."""


async def connect(url: str, **how: Any) -> Connection:
    """Connect as asyncpg does, to the first host of ``url`` that answers and has the session attributes that it asks
    for. Raises like asyncpg: the error of the first host that could not be reached."""
    left = hosts_of(url)
    if len(left) == 1 or parameters_of(url).get("target_session_attrs") == "prefer-standby":
        return await asyncpg.connect(url, **how)
    asked: set[asyncio.Task[Connection]] = set()
    errors: list[BaseException] = []
    try:
        while left or asked:
            if left:
                asked.add(asyncio.create_task(asyncpg.connect(left.pop(0), **how)))
            patience = NEXT_HOST_SECONDS if left else None
            done, _ = await asyncio.wait(asked, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                asked.remove(one)
                if (error := one.exception()) is None:
                    return one.result()
                errors.append(error)
    finally:
        for one in asked:
            one.add_done_callback(_end)
            one.cancel()
    raise next((one for one in errors if not isinstance(one, asyncpg.TargetServerAttributeNotMatched)), errors[0])


def _end(late: asyncio.Task[Connection]) -> None:
    """Close the connection of an abandoned attempt."""
    if not late.cancelled() and late.exception() is None:
        late.result().terminate()
