"""Changes over HTTP that do not apply to held messages say that these exist, with a real store."""

from __future__ import annotations

import json

import pytest

from delayer.store.schedules import changes
from tests.integration.test_schedules import claimed, scene
from tests.support.fakes import WHY
from tests.support.raw import Props
from tests.support.schedules import HOUR_MS, rewind, schedule
from tests.support.store import opened, owned, parcel
from tests.unit.http.inside import TOKEN, Inside, served

AUTH = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}


@pytest.mark.parametrize("query", ["key=k%26", "message_id=m-1"])
async def test_a_cancel_and_a_reschedule_name_a_held_message(database: str, query: str) -> None:
    async with opened(database) as store, owned(store) as [lane], served(Inside(store={"url": database})) as web:
        properties = Props(message_id=b"m-1").encode()
        one = parcel(store.now_upper_ms(), b"held", key=b"k&")._replace(properties=properties)
        await store.hold(lane, [(one, WHY)])
        for method, body in (("DELETE", b""), ("PATCH", b'{"delay": "1h"}')):
            answer = await web.ask(method, f"/api/messages?{query}", body, AUTH)
            assert (answer.status, "at least one is held" in answer.json["detail"]) == (404, True), answer.text
            assert f"/api/held?{query};" in answer.json["next"]
        listed = await web.ask("GET", f"/api/held?{query}", b"", AUTH)
        assert [one["held"]["reason"] for one in listed.json["messages"]] == [WHY.text]
        gone = await web.ask("DELETE", f"/api/messages?{query}x", b"", AUTH)
        assert (gone.status, "is held" in gone.json["detail"]) == (404, False)


async def test_a_removed_schedule_says_how_many_messages_stay_held(database: str) -> None:
    async with scene(database, lanes=1) as ([lane], admin), served(Inside(store={"url": database})) as web:
        await changes.apply(admin, [schedule()], who="me")
        await rewind(admin, HOUR_MS)
        await lane.scan()
        _, dues = await claimed([lane])
        await lane.claimers[0].settle([], [(due, WHY) for due in dues])
        answer = await web.ask("DELETE", "/api/schedules/tick", b"", AUTH)
        assert (answer.status, json.loads(answer.body)) == (200, {"removed": "tick", "held": 1})
