"""The simulated store's server: its sessions, its pace, and what may happen to it.

Two addresses lead to one Postgres: that of the primary, and that of its synchronous standby. A failover swaps them.
SQL, locks, visibility and errors are the real Postgres's. Of its time, the network, timeouts, deadlock detection and
its death the simulation decides."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

from tests.simulation import clock
from tests.simulation.store.process import DATABASE, ClockedPostgres, Control
from tests.simulation.store.session import Session
from tests.simulation.store.standby import Role

HOSTS: Final = ("postgres", "postgres-2")
PORT: Final = 5432
URL: Final = f"postgresql://postgres@{','.join(HOSTS)}/{DATABASE}?sslmode=disable&target_session_attrs=primary"
PACES: Final = (0.0001, 0.0003, 0.001, 0.003, 0.02)
_GONE_SECONDS: Final = 5.0
"""Real time that a backend may take to end."""


class SimulatedStore:
    """Create it in its loop and on its host; :meth:`start` accepts connections."""

    def __init__(self, process: ClockedPostgres, chance: Callable[[int], int]) -> None:
        self.loop = asyncio.get_running_loop()
        self.chance = chance
        self.control = process.control
        self.address = process.address
        self.sessions: list[Session] = []
        self.waiting: list[Session] = []
        """Those that wait for a lock, the first first."""
        self.frozen = False
        self.running = False
        self.terminates = False
        """The statement under way may end other sessions."""
        self.primary = HOSTS[chance(len(HOSTS))]
        """The host of the primary, or of the last one."""
        self.roles = {self.primary: Role.PRIMARY, self.standby: Role.STANDBY}
        self._process = process
        self._servers: dict[str, asyncio.AbstractServer] = {}
        process.renew()
        self.watch = Control(process.address, DATABASE)
        """For questions about its tables."""

    async def start(self) -> None:
        """Listen at the addresses where something is."""
        self.running = True
        for host, role in self.roles.items():
            if role is not Role.AWAY and host not in self._servers:
                self._servers[host] = await self.loop.create_server(partial(Session, self, host), host, PORT)

    def stop(self) -> None:
        """A fast shutdown of the primary: it tells its clients."""
        self._stop_listening(self.primary)
        for session in list(self.sessions):
            session.terminate()

    def kill(self) -> None:
        """The primary dies: connections break, and transactions without a commit are gone."""
        self._stop_listening(self.primary)
        self.end_backends([session.pid for session in self.sessions if session.pid])
        for session in list(self.sessions):
            session.cut()
            session.leave()

    @property
    def standby(self) -> str:
        return next(host for host in HOSTS if host != self.primary)

    async def assume(self, host: str, role: Role) -> None:
        """Let the server at this address have another role. There the sessions end, at a promotion too."""
        for session in [one for one in self.sessions if one.host == host]:
            session.terminate()
        self.roles[host] = role
        if role is Role.PRIMARY:
            self.primary = host
        if role is Role.AWAY:
            self._stop_listening(host)
        await self.start()

    def close(self) -> None:
        """Release the real sessions, at the end of a simulation."""
        for host in HOSTS:
            self._stop_listening(host)
        self.kill()
        self.watch.close()

    def freeze(self) -> None:
        """It hangs: connections stay, and nothing is answered."""
        self.frozen = True

    def thaw(self) -> None:
        self.frozen = False
        for session in list(self.sessions):
            session.resume()

    def cut_connections(self, which: Callable[[Session], bool] = lambda _: True) -> int:
        """Cut connections without a goodbye. Returns how many."""
        found = [one for one in self.sessions if which(one)]
        for session in found:
            session.cut()
        return len(found)

    def _stop_listening(self, host: str) -> None:
        self.running &= host != self.primary
        if host in self._servers:
            self._servers.pop(host).close()

    # What its sessions use.

    def pace(self) -> float:
        return PACES[self.chance(len(PACES))]

    def set_clock(self) -> None:
        self._process.set_clock(clock.time_of(self.primary))

    def is_blocked(self, pid: int) -> bool:
        return bool(pid) and self.control.numbers(f"SELECT cardinality(pg_blocking_pids({pid}))")[0] > 0

    def is_deadlocked(self, pid: int) -> bool:
        """Whether ``pid`` waits for itself."""
        pids = [session.pid for session in self.waiting]
        rows = self.control.query(
            f"SELECT w, unnest(pg_blocking_pids(w)) FROM unnest(ARRAY{pids}::int[]) AS w ORDER BY 1, 2"
        )
        waits_for = [(int(row[0] or 0), int(row[1] or 0)) for row in rows]
        reached, new = set[int](), {pid}
        while new:
            new = {held for waiter, held in waits_for if waiter in new} - reached
            reached |= new
        return pid in reached

    def settle(self) -> None:
        """Let the sessions that waited for a lock go on, those that can."""
        while any(session.advance() for session in list(self.waiting) if session in self.waiting):
            pass

    def cancel(self, pid: int) -> None:
        """A client asks to cancel a statement. One that waits for nothing has ended before the request arrives."""
        for session in self.waiting:
            if session.pid == pid:
                session.cancel()
                return

    def notify(self, sender: Session, told: bytes) -> None:
        for session in list(self.sessions):
            if session is not sender:
                session.hear(told)

    def end_backends(self, pids: Sequence[int]) -> None:
        if pids:
            self.control.query(f"SELECT pg_terminate_backend(p) FROM unnest(ARRAY{list(pids)}::int[]) AS p")
            self.until_gone(pids)

    def until_gone(self, pids: Iterable[int]) -> None:
        """Wait, in real time, until these backends have ended."""
        pids = [pid for pid in pids if pid]
        began = clock.real_seconds()
        while self.control.query(f"SELECT 1 FROM pg_stat_activity WHERE pid = ANY(ARRAY{pids}::int[])"):
            if clock.real_seconds() > began + _GONE_SECONDS:
                raise RuntimeError(f"backends {pids} do not end")

    def reap(self, answer: bytes) -> None:
        """End the sessions whose backends another session's statement has terminated."""
        if not _count_of(answer):
            return
        alive: set[int] = set()
        began = clock.real_seconds()
        while clock.real_seconds() < began + _GONE_SECONDS:
            alive = set(self.control.numbers("SELECT pid FROM pg_stat_activity"))
            if gone := [session for session in self.sessions if session.pid and session.pid not in alive]:
                for session in gone:
                    session.lose_backend()
                return


def _count_of(answer: bytes) -> int:
    """The number in the first row of an answer."""
    at = 0
    while at + 5 <= len(answer):
        size = int.from_bytes(answer[at + 1 : at + 5])
        if answer[at : at + 1] == b"D":
            value = answer[at + 11 : at + 1 + size]
            return int.from_bytes(value)
        at += 1 + size
    return 0


__all__ = ["HOSTS", "PORT", "URL", "Role", "SimulatedStore"]
