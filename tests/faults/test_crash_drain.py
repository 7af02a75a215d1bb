"""A drain killed at every step, there and back: the next run resumes it, and every message is accounted for."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest

from tests.support.place import Place, eventually

SEED = 70_000
MESSAGES = 600
DELAY_MS = 90_000
"""Five drains, four of which are killed, must be over before, on a busy machine too."""
PORTION = 100
LOWEST = 2
"""The lowest level emptied, of 4 s; messages in lower levels leave by themselves during the drain."""
PROGRAM = f"""
from delayer.cli import drain
from delayer.imports import queues
queues.BATCH = {PORTION}
drain.PORTION = {PORTION}
drain.LOWEST, drain.MARGIN_MS = {LOWEST}, 2_000
from delayer.cli.main import main
main()
"""


async def drained(place: Place, to: str, fault: str = "") -> tuple[int, str]:
    """Run the drain. Return its exit code and output."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DELAYER_")}
    environ |= {f"DELAYER_{name}": value for name, value in (place.environ | {"MODE": to}).items()}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, "drain", "--to", to, "--yes",
        env=environ | ({"DELAYER_FAULT": fault} if fault else {}),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode()


async def killed(place: Place, to: str, *faults: str) -> None:
    for fault in faults:
        code, said = await drained(place, to, fault)
        assert code == -signal.SIGKILL, (fault, said)


@pytest.mark.deadline(240)
async def test_killed_at_every_step_there_and_back(vhost: str, store: str) -> None:
    place = await Place("native", vhost, store).declare()
    async with place.ledger(SEED) as ledger:
        async with place.working(MODE="store"):
            await ledger.publish(MESSAGES, delay_ms=DELAY_MS, absolute=True)
            await eventually(place.rows, lambda rows: rows == MESSAGES)
        async with place.working():
            # Each drain resumes where the last one died, and dies in its second portion.
            await killed(
                place, "native", "drain.taken:2", "publish.written:2", "drain.published:2", "drain.committed:2"
            )
            assert 0 < await place.rows() < MESSAGES
            code, said = await drained(place, "native")
            assert (code, await place.rows()) == (0, 0), said
            assert "Nothing is left in the store." in said
            assert ledger.total() == 0, "nothing was due yet: otherwise this shows nothing"

            await killed(place, "store", "import.taken:2", "import.committed:2", "import.removed:2")
            code, said = await drained(place, "store")
            assert code == 0, said
            assert await place.rows() >= MESSAGES
            assert ledger.total() == 0
            await ledger.all_back(timeout=120)
            await eventually(place.standing, lambda standing: not standing)
        verdict = await place.settle_accounts(ledger)
    counters = await place.conserved()
    print(verdict, counters)
    verdict.assert_kept(repeats=True)
    # Perhaps repeated: a portion without its confirms, one without its commit, and one committed and not removed.
    assert 0 < len(verdict.repeats) <= 3 * PORTION
