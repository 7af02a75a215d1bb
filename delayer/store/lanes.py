"""Taking lanes: who has the advisory lock owns the lane, and raises its epoch before doing anything with it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from typing import Final

import asyncpg
import structlog

from delayer.core.errors import StoreLost
from delayer.store import handover, outlook, owners, session, statements, telling
from delayer.store.clock import StoreClock
from delayer.store.errors import translated
from delayer.store.lane import PostgresLane
from delayer.store.outlook import PooledLooks, Start

log = structlog.get_logger()

_LOCK = "SELECT pg_try_advisory_lock('lane'::regclass::oid::int, $1)"
_RAISE = "UPDATE lane SET epoch = epoch + 1, owner = $2 WHERE number = $1 RETURNING epoch, watermark"
_NEW = (
    "INSERT INTO lane (number, epoch, owner)"
    " SELECT coalesce(max(number), 0) + 1, 0, $1 FROM lane"
    " ON CONFLICT DO NOTHING RETURNING number"
)
THOROUGH_SECONDS: Final = 60.0
"""How often lanes without an owner are read from their beginning, and not from their watermark: it may be ahead of rows
that were put there by hand, or before a clock was set."""


class LaneTaker:
    """Opens one connection a lane and takes its lock there."""

    def __init__(
        self,
        url: str,
        pool: asyncpg.Pool,
        clock: StoreClock,
        *,
        owner: str,
        idle: float,
        releasing: float,
        broker: Callable[[], str] = str,
    ) -> None:
        """``broker``: the mark of the one that is published to, as far as it is known (owners.py). ``idle``: seconds
        after which the server ends a lane's connection that says nothing, in a transaction or not; ``releasing``: for
        how long a release is kept from that."""
        self._url = url
        self._looks = PooledLooks(pool)
        self._clock = clock
        self._owner = owner
        self._releasing = releasing
        self._broker = broker
        self._thorough_at = -math.inf
        self._timeouts = {
            "idle_session_timeout": f"{idle * 1000:.0f}ms",
            "tcp_user_timeout": f"{idle * 1000:.0f}ms",
            "idle_in_transaction_session_timeout": f"{idle * 1000:.0f}ms",
            # The claim's plan must be an index range and a join by place, whatever the statistics say of a partition
            # that was filled a second ago: a wrong guess was measured at 122 ms a claim instead of 4.
            "enable_seqscan": "off",
            "enable_bitmapscan": "off",
            "enable_hashjoin": "off",
            "enable_mergejoin": "off",
        }

    async def free(self, asker: asyncpg.Connection) -> list[int]:
        """Lanes without a living owner, those with rows first."""
        return [row["number"] for row in await asker.fetch(statements.LANES_FREE)]

    async def due_soon(self, asker: asyncpg.Connection) -> list[int]:
        """Lanes without a living owner that need one, the soonest due first."""
        now = self._clock.monotonic()
        thorough = now >= self._thorough_at
        if thorough:
            # At once: if it takes too long, among many dead entries, the next one must not be as slow.
            self._thorough_at = now + THOROUGH_SECONDS
        return await outlook.due_soon(asker, self._clock.now_ms(), from_the_beginning=thorough)

    async def take(self, numbers: Iterable[int], count: int, *, spare: bool = False) -> list[PostgresLane]:
        """Up to ``count`` of the lanes ``numbers``. Another daemon may be quicker: then fewer; and fewer when the store
        fails after the first, as when it has no connections left. ``spare``: to look after until somebody asks for
        them. Raises StoreLost if there are none for it."""
        taken: list[PostgresLane] = []
        try:
            for number in numbers:
                if len(taken) == count:
                    break
                lane = await self._take(number, spare)
                if lane is not None:
                    taken.append(lane)
        except StoreLost as lost:
            _made_do(taken, lost)
        except BaseException:
            await _let_go(taken)
            raise
        return taken

    async def handed_over(self, count: int) -> list[PostgresLane]:
        """Up to ``count`` lanes that others only look after, those that they let go of in time. Raises StoreLost."""
        taken: list[PostgresLane] = []
        until = self._clock.monotonic() + handover.SECONDS
        # With the timeouts of a lane: a question that outlived us would keep the lanes from those who adopt.
        asker = await session.connect(self._url, "delayer asks for lanes", self._timeouts)
        try:
            with translated("ask for lanes"):
                left = await handover.ask(asker, count)
                while left and self._clock.monotonic() < until:
                    taken += await self.take(await handover.free(asker, left), len(left))
                    left -= {lane.number for lane in taken}
                    await asyncio.sleep(handover.LOOK_SECONDS)
        except StoreLost as lost:
            _made_do(taken, lost)
        except BaseException:
            await _let_go(taken)
            raise
        finally:
            await session.close(asker)
        return taken

    async def create(self, asker: asyncpg.Connection) -> int | None:
        """A new lane's number; None if another daemon made one at the same moment."""
        number: int | None = await asker.fetchval(_NEW, self._owner)
        return number

    async def _take(self, number: int, spare: bool) -> PostgresLane | None:
        connection = await session.connect(self._url, owners.application_of(number, self._broker()), self._timeouts)
        mailbox = telling.Mailbox()
        try:
            with translated(f"take lane {number}"):
                if not await connection.fetchval(_LOCK, number):
                    await session.close(connection)
                    return None
                # Before anything is read: what others put into the lane from here on is either told, or seen.
                await mailbox.listen(connection, number)
                if spare:
                    await handover.say_spare(connection, number)
                # Waits for parks that are under way in the old epoch; when it returns, all of them can be seen.
                epoch, watermark = await connection.fetchrow(_RAISE, number, self._owner)
                await session.sample(connection, self._clock)
                retry_ms = await connection.fetchval(statements.NEXT_RETRY, number)
        except BaseException:
            connection.terminate()
            raise
        start = Start(epoch, watermark, retry_ms)
        lane = PostgresLane(number, start, connection, self._clock, self._looks, release_seconds=self._releasing)
        mailbox.open(lane.hear)
        return lane


def _made_do(taken: list[PostgresLane], lost: StoreLost) -> None:
    """What is in hand is better than nothing, and the next look goes on. Raises ``lost`` for nothing."""
    if not taken:
        raise lost
    log.warning("store unreachable", doing="take lanes", taken=len(taken), reason=str(lost))


async def _let_go(taken: list[PostgresLane]) -> None:
    for lane in taken:
        await lane.release()
