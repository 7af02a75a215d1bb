"""Ctrl-C stops each backlog command within seconds, with one line, in each phase without a JVM. So does SIGTERM, which
the commands take as Ctrl-C: two phases show that, one in each driver.

Another session holds a lock to keep the command in its phase. Phases with a JVM: tests/audit/test_killed.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from itertools import product
from pathlib import Path

import pytest

from delayer.core.units import DAY_MS
from tests.support.daemon import EXECUTABLE
from tests.support.rows import compact, put, rows
from tests.support.store import blocked, sql

EMPTY = "message_p20991231"
PHASES = {
    "quick audit, waiting": (["audit", "--no-broker"], "counter", "LOCK TABLE message%"),
    "deep audit, planning": (["audit", "--deep", "--no-broker"], "delayer_schema_version", "SELECT version_num%"),
    "compact, planning": (["compact"], "message", "%date_trunc('hour', due_at)%"),
    "compact, giving room back": (["compact"], f"{EMPTY} IN SHARE UPDATE EXCLUSIVE MODE", "VACUUM%"),
    "restore, planning": (["restore", "--all"], "segment", "%segment%"),
    "restore, restoring": (["restore", "--all"], "counter IN EXCLUSIVE MODE", "%INTO counter%"),
    "backlog export, waiting": (["backlog", "export", "DIR"], "message", "LOCK TABLE ONLY message%"),
    "backlog export, reading": (["backlog", "export", "DIR"], "segment", "%segment%"),
}
"""The command, the lock, and the statement that waits for it."""
SIGNALS = {signal.SIGINT: (130, "interrupted"), signal.SIGTERM: (143, "ended by SIGTERM")}
SECONDS = 20.0
"""A stop takes less than 3 s of a core, at the lowest priority. A wait for the lock would take 30 s."""


def left(path: Path) -> list[Path]:
    return list(path.iterdir())


@pytest.mark.parametrize(
    ("phase", "number"),
    [*product(PHASES, [signal.SIGINT]), *product(["quick audit, waiting", "restore, restoring"], [signal.SIGTERM])],
)
async def test_a_stop(database: str, tmp_path: Path, phase: str, number: int) -> None:
    words, lock, waits = PHASES[phase]
    where = tmp_path / "backlog"
    async with sql(database) as admin, sql(database) as other:
        now = await admin.fetchval("SELECT now()")
        await put(admin, rows(600, now + 3 * DAY_MS))
        await compact(admin)
        await put(admin, rows(600, now + 3 * DAY_MS, first_id=1_000))
        await admin.execute(
            f"CREATE TABLE {EMPTY} PARTITION OF message FOR VALUES FROM ('2099-12-31 00:00Z') TO ('2100-01-01 00:00Z')"
        )
        await other.execute(f"BEGIN; LOCK TABLE {lock}")
        process = await asyncio.create_subprocess_exec(
            str(EXECUTABLE), "--store-url", database, *(str(where) if word == "DIR" else word for word in words),
            env=os.environ | {"DELAYER_CONFIG": os.devnull},
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        try:
            await blocked(admin, waits)
            began = time.monotonic()
            os.killpg(process.pid, number)
            async with asyncio.timeout(SECONDS):
                _, told = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        print(f"{phase}: ended after {time.monotonic() - began:.1f} s")
    code, line = SIGNALS[number]
    assert (process.returncode, told.decode()) == (code, f"delayer: {line}\n")
    assert left(tmp_path) == []


LOCKING = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from delayer.audit import connection
from delayer.audit.extract import hold_snapshot
from delayer.core.secret import SecretUrl

class Slow(ThreadPoolExecutor):
    "The statement waits for its lock before this thread waits for the statement."
    def submit(self, *work):
        begun = super().submit(*work)
        time.sleep(5.0)
        return begun

if sys.argv[2] == "sending":
    connection.ThreadPoolExecutor = Slow
with hold_snapshot(SecretUrl(sys.argv[1])):
    pass
"""


@pytest.mark.parametrize("moment", ["waiting", "sending"])
async def test_a_stop_interrupts_the_driver_of_the_deep_audit(database: str, moment: str) -> None:
    """The driver waits in C for the lock. Without the interruption it would wait for 30 s."""
    async with sql(database) as admin, sql(database) as other:
        await other.execute("BEGIN; LOCK TABLE counter")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", LOCKING, database, moment, stderr=asyncio.subprocess.PIPE, start_new_session=True
        )
        await blocked(admin, "LOCK TABLE message%")
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(50):
            _, told = await process.communicate()
    print(f"ended after {time.monotonic() - began:.1f} s")
    assert told.endswith(b"KeyboardInterrupt\n"), told.decode()
    assert time.monotonic() - began < SECONDS
