"""Changes of schedules over HTTP, with a real store and a stand-in for the daemon: what is done and what is not."""

from __future__ import annotations

import json

from delayer.store.schedules import changes
from tests.integration.test_schedules import REJECT
from tests.support.schedules import schedule
from tests.support.store import sql
from tests.unit.http.inside import TOKEN, Inside, served

AUTH = {"Authorization": f"Bearer {TOKEN}", "Accept": "application/json"}
LOSE = """
CREATE FUNCTION lose() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF NEW.asked::json->>'schedule' = '{}' THEN PERFORM pg_terminate_backend(pg_backend_pid()); END IF;
    RETURN NEW; END $$;
CREATE TRIGGER lose BEFORE INSERT ON audit_log FOR EACH ROW EXECUTE FUNCTION lose();
"""


async def test_a_change_of_many_says_how_far_it_came_without_the_store(database: str) -> None:
    async with served(Inside(store={"url": database})) as web, sql(database) as admin:
        await changes.apply(admin, [schedule(f"s{n}") for n in range(5)], who="test")
        await admin.execute(LOSE.format("s3"))
        form = {"verb": "run", "name": ["s0", "nobody", "s1", "s3", "s4"]}
        answer = await web.post("/actions/schedules", form, **AUTH)
        assert (answer.status, answer.json["heading"], answer.json["done"]) == (200, "Sent now: 2 of 5", 2), answer.text
        refused, stopped = answer.json["lines"]
        assert refused.startswith("nobody: ")
        assert stopped.startswith("Stopped at s3, after 3: ") and stopped.endswith("the rest is not."), stopped
        assert await admin.fetchval("SELECT count(*) FROM audit_log WHERE verb = 'schedule run'") == 2
        nothing = await web.post("/actions/schedules", {"verb": "run", "name": ["s3", "s4"]}, **AUTH)
        assert nothing.status == 503, "nothing was done, so it can be sent again"


async def test_a_schedule_that_fails_at_once_names_a_field(database: str) -> None:
    async with served(Inside(store={"url": database})) as web, sql(database) as admin:
        await changes.apply(admin, [schedule()], who="test")
        await admin.execute(REJECT)
        content = json.dumps({"body": "poison"}).encode()
        wrong = await web.ask("PATCH", "/api/schedules/tick", content, {**AUTH, "Content-Type": "application/json"})
        [error] = wrong.json["errors"]
        assert (wrong.status, error["where"]) == (422, "state"), wrong.text
        assert error["expected"] == "a schedule with a next occurrence"
        assert error["found"].startswith("none: ")
        new = {"every": "1h", "to": "out", "body": "poison"}
        wrong = await web.ask(
            "PUT", "/api/schedules/new", json.dumps(new).encode(), {**AUTH, "Content-Type": "application/json"}
        )
        assert (wrong.status, [one["where"] for one in wrong.json["errors"]]) == (422, ["state"]), wrong.text
