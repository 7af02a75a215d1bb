"""The mode is switched while messages flow, as fast as the machine bears: store, native, store; every one is accounted
for.

The rate is what is offered. What is asserted is the ledger, how long a switch takes, and that both ways were gone; not
the rate that came about: that depends on who else is at work, and a test is no benchmark. It is printed, and kept with
the test's report (``flow_rate``), for who wants to know what a passed run has shown.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.place import Place
from tests.support.daemon import DaemonProcess
from tests.support.flow import flowing
from tests.support.servers import Postgres

SEED = 2_007
LONGEST_MS = 4_000
IN_FORCE = 10.0
"""Seconds from the signal to the new mode, of a daemon that has no time; a tenth of one, mostly."""
BY_STORE = 32
"""The ids of what the store released are shorter than that: it numbers its rows."""


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
    """As long in each mode as ``rate * seconds`` messages take. What the store holds at the switch to native is
    released by it all the same."""
    # To the place, native mode with a store is everything there is: the cascade and the rows.
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
    assert max(took) < IN_FORCE, "whoever sends the signal is waiting"
    # What stood in the intake queue at a switch goes the other way, and that is most of it on a slow machine.
    assert counters["parked"] == counters["released"] > rate
    assert (await daemon.event("stopped"))["cascaded"] > rate
    assert verdict.sent == flow.count
    meanwhile = [one.id for (one,) in ledger.arrivals.values() if native_ms < one.at_ms < store_ms]
    assert sum(len(id) < BY_STORE for id in meanwhile) > rate / 4, "the store went on releasing"
    assert sum(len(id) >= BY_STORE for id in meanwhile) > rate / 4, "and the cascade began"
