"""Messages that the database rejects, and lanes that do not advance: the rest arrive, and readiness, `check`, metrics
and status are truthful."""

from __future__ import annotations

import json

import pytest

from delayer.core.message import Target
from delayer.store.errors import DAMAGE_ADVICE
from tests.acceptance.own_vhost import OwnVhost, delayed
from tests.acceptance.world import STORE
from tests.integration.cli import Run
from tests.integration.test_store_rejects import reject
from tests.support.place import eventually
from tests.support.store import opened, owned, parcel, sql
from tests.support.web import Web

ANY_PORT = {"HTTP__LISTEN": "127.0.0.1:0"}
GOOD = [b"%d" % n for n in range(100)]
CASES = {
    "a reason": ("INSERT", "held", "NEW.body = 'bad' AND NEW.reason ~ '404'"),
    "a hold": ("INSERT", "held", "NEW.body = 'bad'"),
    "a claim": ("DELETE", "message", "OLD.body = 'bad'"),
    "a park": ("INSERT", "message", "NEW.body = 'bad'"),
    "a plain exception": ("INSERT", "message", "NEW.body = 'bad'", "P0001"),
}


@pytest.mark.parametrize("case", CASES)
async def test_one_message_that_the_database_rejects(place: OwnVhost, store: str, case: str) -> None:
    async with sql(store) as admin:
        await reject(admin, *CASES[case])
        async with place.working(place.environ(STORE, store) | ANY_PORT) as (daemon, raw, inbox):
            refused = await raw.inbox("delays.refused")
            through = "in.missing" if case in ("a reason", "a hold") else "in"
            messages = [delayed(body.decode(), 1500) for body in GOOD]
            await raw.publish(*messages[:60], delayed("bad", 1500, through=through), *messages[60:])
            await eventually(lambda: all(body in inbox.counts for body in GOOD))
            if case in ("a park", "a plain exception"):
                await eventually(lambda: b"bad" in refused.counts)
            else:
                event = await daemon.event("row rejected" if case == "a reason" else "row skipped")
                assert "planted" in event["reason"]
            left = 1 if case in ("a hold", "a claim") else 0
            await eventually(lambda: admin.fetchval("SELECT count(*) FROM message"), lambda waiting: waiting == left)
            reasons = [row["reason"] for row in await admin.fetch("SELECT reason FROM held")]
            plain = "the database rejected the data of this hold (SQLSTATE 22021)"
            assert reasons == ([plain] if case == "a reason" else [])
            assert (await (await Web.of(daemon)).get("/health/ready")).status == 200
            assert await daemon.stop() == 0
            await raw.round_trip()
            assert inbox.counts == dict.fromkeys(GOOD, 1), "none came twice"
            assert not {"lane lost", "lane given up", "consuming interrupted"} & {one["event"] for one in daemon.events}


async def test_a_lane_that_does_not_advance(place: OwnVhost, store: str, delayer: Run) -> None:
    """Settling fails for every row, so the daemon keeps losing the lane."""
    environ = {"DELAYER_BROKER__URL": place.url, "DELAYER_STORE__URL": store}
    async with opened(store) as parking, owned(parking) as [lane]:
        await parking.park(lane, [parcel(parking.now_upper_ms() - 50_000, target=Target(b"out", b"k"))], [])
    async with sql(store) as admin:
        await admin.execute("UPDATE message SET parked_at = now() - interval '50 seconds'")
        await reject(admin, "INSERT", "counter", "NEW.kind = 'released'", "XX001")
        async with place.working(place.environ(STORE, store) | ANY_PORT) as (daemon, raw, _):
            event = await daemon.event("release interrupted")
            assert event["next_step"] == DAMAGE_ADVICE
            web = await Web.of(daemon)
            answer = await eventually(lambda: web.get("/health/ready"), lambda answer: answer.status == 503)
            [reason] = answer.json["reasons"]
            assert reason.startswith("lane 1 has had due messages for ")
            assert (await web.metrics())["delayer_stuck_lanes",] == 1
            checks = json.loads(delayer("check", "--json", expect=1, **environ).stdout)["checks"]
            off = [row for row in checks if row["what"] == "lanes" and row["result"] == "off"]
            assert len(off) == 1, checks
            shown = delayer("status", **environ).stdout
            assert " stuck " in shown, shown
            await admin.execute("DROP TRIGGER rejecting ON counter")
            await eventually(lambda: web.get("/health/ready"), lambda answer: answer.status == 200)
            await eventually(lambda: " stuck " not in delayer("status", **environ).stdout)
            assert await daemon.stop() == 0
            await raw.round_trip()
