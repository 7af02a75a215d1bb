"""A real daemon sends the occurrences of schedules: on time, each once, until an operator stops them."""

from __future__ import annotations

import re
from dataclasses import replace

from delayer.core.message import Target
from delayer.core.units import HOUR_MS
from delayer.schedule.missed import LATE_MS
from delayer.schedule.rhythm import Every
from delayer.schedule.schedule import ScheduleState
from delayer.store.admin import audit_log
from delayer.store.schedules import changes
from tests.acceptance.own_vhost import OwnVhost
from tests.support.place import Place, eventually
from tests.support.schedules import OccurrenceInbox, check_waiting, record, schedule
from tests.support.store import sql
from tests.support.web import Web, tokens_file

SECOND = Every(1_000)


async def test_every_second_each_occurrence_comes_once_and_operators_change_the_schedule(
    vhost: str, database: str
) -> None:
    place = await Place("store", vhost, database).declare()
    async with sql(database) as admin, OccurrenceInbox.open(place) as inbox, place.working():
        added = await changes.add(admin, schedule(rhythm=SECOND, body=b"first"), who="test")
        first_ms = added.waiting_ms or 0
        await eventually(lambda: len(inbox.came), lambda came: came >= 4)

        await changes.edit(admin, "tick", lambda one: replace(one, body=b"second"), who="test")
        await eventually(lambda: len(inbox.came), lambda came: came >= 7)
        bodies = [came[0].body for came in inbox.of("tick").values()]
        assert bodies == sorted(bodies)
        assert bodies[-1] == b"second"

        paused = await changes.pause(admin, "tick", who="test")
        last_ms = paused.settled_ms or 0
        await eventually(lambda: max(inbox.of("tick")), lambda at_ms: at_ms == last_ms)
        assert list(inbox.of("tick")) == list(range(first_ms, last_ms + 1, 1_000))
        assert (paused.made, paused.missed) == (len(inbox.came), 0)
        assert 0 <= (paused.late_ms or 0) < LATE_MS
        await changes.run_now(admin, "tick", who="test")
        await eventually(lambda: len(inbox.came), lambda came: came == paused.made + 1)

        resumed = await changes.resume(admin, "tick", who="test")
        await eventually(lambda: inbox.of("tick"), lambda came: (resumed.waiting_ms or 0) + 2_000 in came)
        await changes.remove(admin, "tick", who="test")
        await changes.add(admin, schedule("twice", rhythm=SECOND, max_occurrences=2), who="test")
        await eventually(lambda: record(admin, "twice"), lambda one: one.state is ScheduleState.ENDED)
        await check_waiting(admin, "twice")
        await eventually(lambda: inbox.of("twice"), lambda came: len(came) == 2)
    assert {len(came) for came in inbox.came.values()} == {1}
    assert len({one.message_id for came in inbox.came.values() for one in came}) == len(inbox.came)
    assert not await place.standing()
    await place.conserved()


async def test_the_page_and_programs_see_and_change_schedules(place: OwnVhost, store: str) -> None:
    token = "open-sesame-open-sesame"
    allowed = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
    environ = place.environ("store", store) | {"HTTP__LISTEN": "127.0.0.1:0", "HTTP__TOKENS_FILE": tokens_file(token)}
    async with place.working(environ) as (daemon, _, inbox), sql(store) as admin:
        web = await Web.of(daemon)
        assert "There are no schedules." in (await web.get("/schedules")).text
        there = [schedule(f"s{n:02}", rhythm=Every(HOUR_MS), target=Target(b"out", b"inbox")) for n in range(51)]
        await changes.apply(admin, there, who="test")
        await changes.pause(admin, "s01", who="test")

        first = (await web.get("/api/schedules", **allowed)).json
        assert [one["name"] for one in first["schedules"]] == [f"s{n:02}" for n in range(50)]
        rest = (await web.get("/api" + first["next"].removeprefix("/api"), **allowed)).json
        assert ([one["name"] for one in rest["schedules"]], rest["next"]) == (["s50"], "")
        paused = (await web.get("/api/schedules?state=paused", **allowed)).json["schedules"]
        assert [one["name"] for one in paused] == ["s01"]
        one = (await web.get("/api/schedules/s00", **allowed)).json
        assert (one["rhythm"], one["state"], one["body"]) == ("Every hour", "active", "tick")
        for path, status in (("schedules/nobody", 404), ("schedules?state=x", 400), ("schedules?stat=x", 400)):
            assert (await web.get(f"/api/{path}", **allowed)).status == status

        page = (await web.get("/schedules")).text
        assert f'<a href="/message/{one["next_message"]}">s00</a>' in page
        assert "Every hour" in page
        assert "<span>1–1 of 1</span>" in (await web.get("/schedules?state=paused")).text
        assert "out / inbox" in page
        assert 'name="verb"' not in page, "without the token there is nothing to press"
        act = {"verb": "pause", "name": ["s00", "nobody"]}
        assert (await web.post("/actions/schedules", act)).status == 403
        done = (await web.post("/actions/schedules", act, **allowed)).json
        assert (done["heading"], done["done"]) == ("Paused: 1 of 2", 1)
        [line] = done["lines"]
        assert line.startswith("nobody: name: expected a schedule of this store")
        done = (await web.post("/actions/schedules", {"verb": "resume", "name": ["s00", "s01"]}, **allowed)).json
        assert done["heading"] == "Resumed: 2 of 2"
        assert (await web.post("/actions/schedules", {"verb": "run"}, **allowed)).status == 400
        assert (await web.post("/actions/schedules", {"verb": "remove", "name": "s00"}, **allowed)).status == 400
        session = await web.post("/login", {"who": "ada", "token": token})
        ada = {"Cookie": session.headers["set-cookie"].partition(";")[0]}
        assert "Send one now" in (await web.get("/schedules", **ada)).text
        sent = await web.post("/actions/schedules", {"verb": "run", "name": "s02", "back": "/schedules"}, **ada)
        told = (await web.get(sent.headers["location"], **ada)).text
        assert re.findall('role="status"><strong>(.*?)</strong>', told) == ["Sent now: 1 of 1"]
        await inbox.got([b"tick"])
        latest, *_ = await audit_log.list_entries(admin, 1)
        assert (latest.verb, latest.who) == ("schedule run", "ada (token ops, page, 127.0.0.1)")

        seen = await eventually(web.metrics, lambda seen: ("delayer_schedules", "state=active") in seen)
        assert seen["delayer_schedules", "state=active"] == 51
        assert seen["delayer_schedule_occurrences", "kind=missed"] == 0

        await changes.add(admin, schedule("lost", target=Target(b"", b"nowhere")), who="test")
        await changes.run_now(admin, "lost", who="test")
        await eventually(lambda: web.get("/api/schedules/lost", **allowed), lambda seen: seen.json["held"] == 1)
        page = (await web.get("/schedules")).text
        assert '<a href="/held?header=x-delayer-schedule%3Dlost">1</a>' in page
        assert '<td data-label="to" class="wide">queue nowhere</td>' in page
        assert "(schedule s00)" in (await web.get("/waiting?key=delayer.schedule/s00")).text
        assert await daemon.stop() == 0
        assert not [one for one in daemon.events if one["level"] == "error"]
