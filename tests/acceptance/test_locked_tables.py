"""A session locks a table of the store: nothing goes in or out, and the daemon reports it. What was published meanwhile
is not published again."""

from __future__ import annotations

import json

from tests.acceptance.own_vhost import OwnVhost, delayed
from tests.acceptance.world import STORE
from tests.integration.cli import Run
from tests.support.place import eventually
from tests.support.ports import reserve
from tests.support.store import blocked, sql
from tests.support.web import Web

END_LANES = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
    " WHERE datname = current_database() AND application_name LIKE 'delayer lane %'"
)
UNSETTLED = "queue 'delays': nothing that was read from it was settled for "


async def test_a_locked_table_makes_the_daemon_unready(place: OwnVhost, store: str, delayer: Run) -> None:
    environ = place.environ(STORE, store) | {"HTTP__LISTEN": f"127.0.0.1:{reserve()}"}
    async with sql(store) as admin, place.working(environ) as (daemon, raw, inbox):
        web = await Web.of(daemon)
        await raw.publish(delayed("before", 100))
        await eventually(lambda: inbox.counts[b"before"])
        lock = admin.transaction()
        await lock.start()
        await admin.execute("LOCK TABLE message IN SHARE MODE")
        await raw.publish(*(delayed(f"{n}", 1500) for n in range(3)))
        event = await daemon.event("consuming interrupted", timeout=60.0)
        assert "pg_blocking_pids" in event["next_step"], event
        answer = await eventually(lambda: web.get("/health/ready"), lambda answer: UNSETTLED in str(answer.json))
        assert answer.status == 503
        settings = {f"DELAYER_{name}": value for name, value in environ.items()}
        checks = json.loads(delayer("check", "--json", expect=1, **settings).stdout)["checks"]
        assert [row["found"] for row in checks if row["what"] == "daemon" and UNSETTLED in row["found"]], checks
        await lock.rollback()
        await eventually(lambda: all(inbox.counts[b"%d" % n] for n in range(3)))
        await eventually(lambda: web.get("/health/ready"), lambda answer: answer.status == 200)
        assert await daemon.stop() == 0


async def test_lanes_that_are_lost_and_taken_again_repeat_nothing(place: OwnVhost, store: str) -> None:
    """The server ends the sessions of a process that gets no processor time. Their messages are published, and not
    settled."""
    bodies = [b"%d" % n for n in range(40)]
    async with (
        sql(store) as admin,
        sql(store) as watch,
        place.working(place.environ(STORE, store)) as (daemon, raw, inbox),
    ):
        await raw.publish(*(delayed(body.decode(), 5_000) for body in bodies))
        await eventually(lambda: watch.fetchval("SELECT count(*) FROM message"), lambda parked: parked == len(bodies))
        async with admin.transaction():
            await admin.execute("LOCK TABLE counter IN SHARE MODE")
            await eventually(lambda: all(body in inbox.counts for body in bodies))
            await blocked(watch, "%counter%")
            await watch.execute(END_LANES)
        await eventually(lambda: watch.fetchval("SELECT count(*) FROM message"), lambda waiting: waiting == 0)
        assert await daemon.stop() == 0
        await raw.round_trip()
        assert inbox.counts == dict.fromkeys(bodies, 1)
        assert "lane lost" in {one["event"] for one in daemon.events}
