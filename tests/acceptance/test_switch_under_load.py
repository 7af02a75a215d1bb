"""The mode is switched while messages flow, as fast as the machine can: store, native, store; every message is
accounted for.

The rate is an upper bound. The test asserts the ledger, the time of a switch, and that messages went both ways. It does
not assert the actual rate, which depends on other processes: it prints it, and keeps it in the test's report
(``flow_rate``).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.daemon import DaemonProcess
from tests.support.flow import flowing
from tests.support.place import Place
from tests.support.servers import Postgres

SEED = 2_007
LONGEST_MS = 4_000
IN_FORCE = 10.0
"""Seconds from the signal to the new mode of a busy daemon; usually a tenth of a second."""
BY_STORE = 32
"""The ids of released rows are shorter than that: the store numbers its rows."""


@pytest.mark.deadline(900)
@pytest.mark.parametrize(
    ("rate", "seconds"),
    [pytest.param(1_000, 3.0, id="1000"), pytest.param(5_000, 15.0, id="5000", marks=pytest.mark.long)],
)
async def test_store_native_store(
    vhost: str,
    postgres: Postgres,
    schema: str,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
    rate: int,
    seconds: float,
) -> None:
    """``rate * seconds`` messages flow in each mode. After the switch to native mode the store still releases its
    messages."""
    # A place in native mode with a store checks everything: the cascade and the rows.
    place = await Place("native", vhost, postgres.url(schema)).declare()
    environ = {name: value for name, value in place.environ.items() if name != "MODE"}
    file = tmp_path / "delayer.toml"

    def write(mode: str) -> None:
        file.write_text(f"mode = {json.dumps(mode)}\n")

    took: list[float] = []
    write("store")
    async with place.ledger(SEED) as ledger, DaemonProcess(environ, config=file) as daemon:
        await daemon.ready()
        async with flowing(ledger, rate, longest_ms=LONGEST_MS) as flow:

            async def flowed() -> None:
                enough = flow.count + rate * seconds
                await ledger.until(lambda: flow.count >= enough, timeout=30 * seconds)

            async def switch(mode: str) -> None:
                seen, began = len(daemon.events), time.monotonic()
                write(mode)
                daemon.reload()
                switched = await daemon.event("mode switched", after=seen, timeout=90)
                assert switched["now"] == mode
                took.append(time.monotonic() - began)

            await flowed()
            await switch("native")
            native_ms = time.time() * 1000
            await flowed()
            await switch("store")
            store_ms = time.time() * 1000
            await flowed()
        await ledger.all_back(timeout=240)
        assert await daemon.stop() == 0
        verdict = await place.settle_accounts(ledger)
        counters = await place.conserved()
    record_property("flow_rate", round(flow.rate))
    print(f"{flow.rate:.0f} of {rate} messages a second, switched within {took} s; {verdict}; {counters}")
    verdict.assert_kept()
    assert max(took) < IN_FORCE, "the sender of the signal is waiting"
    # Messages in the intake queue at a switch go the other way: on a slow machine these are most of them.
    assert counters["parked"] == counters["released"] > rate
    assert (await daemon.event("stopped"))["cascaded"] > rate
    assert verdict.sent == flow.count
    meanwhile = [one.id for (one,) in ledger.arrivals.values() if native_ms < one.at_ms < store_ms]
    assert sum(len(id) < BY_STORE for id in meanwhile) > rate / 4, "the store went on releasing"
    assert sum(len(id) >= BY_STORE for id in meanwhile) > rate / 4, "and the cascade began"
