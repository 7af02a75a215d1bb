"""What commands say about messages that were sent by SQL, and that no daemon has moved."""

from __future__ import annotations

import json
from typing import Any

from tests.integration.cli import Run
from tests.integration.test_quick_audit import audited
from tests.support.store import sql

OLDER = "UPDATE delayer_inbox SET sent_at = now() - $1::text::interval"


async def test_commands_count_messages_that_no_daemon_reads(database: str, delayer: Run) -> None:
    def inbox() -> dict[str, Any]:
        return dict(json.loads(delayer("status", "--json").stdout)["store"]["inbox"])

    async def found() -> list[tuple[str, int]]:
        return [(one.severity, one.count) for one in (await audited(database)).findings if one.rule == "inbox"]

    delayer("topology", "apply")
    assert inbox() == {"messages": 0, "age_ms": 0, "read": False}
    assert "SQL inbox" not in delayer("status").stdout
    async with sql(database) as app:
        await app.execute("SELECT delayer_send('k', 'x') FROM generate_series(1, 3)")
        assert inbox()["messages"] == 3
        assert "SQL inbox: 3 not moved yet; the oldest was sent" in delayer("status").stdout
        assert not await found()
        checks = {row["what"] for row in json.loads(delayer("check", "--json", expect=1).stdout)["checks"]}
        assert "SQL inbox" not in checks, "they may be a moment old"

        await app.execute(OLDER, "2 minutes")
        assert inbox()["age_ms"] > 120_000
        rows = {row["what"]: row for row in json.loads(delayer("check", "--json", expect=1).stdout)["checks"]}
        assert rows["SQL inbox"]["result"] == "off"
        assert rows["SQL inbox"]["found"].startswith("3 messages not read yet; the oldest was sent 2")
        assert await found() == [("warning", 3)]
        await app.execute(OLDER, "2 hours")
        assert await found() == [("violation", 3)]

    drained = json.loads(delayer("--mode", "native", "drain", "--to", "native", "--dry-run", "--json").stdout)
    assert [(one["messages"], one["where"]) for one in drained["left"]] == [(3, "SQL inbox")]


async def test_an_inbox_that_cannot_be_counted_spoils_no_other_figure(database: str, delayer: Run) -> None:
    delayer("topology", "apply")
    async with sql(database) as app, app.transaction():
        await app.execute("LOCK TABLE delayer_inbox IN ACCESS EXCLUSIVE MODE")
        status = json.loads(delayer("status", "--json").stdout)["store"]
        assert (status["error"], status["inbox"], status["waiting"]) == (None, None, 0)
        assert "SQL inbox: not counted within 2 s" in delayer("status").stdout
        rows = {row["what"]: row for row in json.loads(delayer("check", "--json", expect=1).stdout)["checks"]}
        assert (rows["SQL inbox"]["result"], rows["store"]["result"]) == ("note", "ok")
        drained = json.loads(delayer("--mode", "native", "drain", "--to", "native", "--dry-run", "--json").stdout)
        assert [(one["messages"], one["where"]) for one in drained["left"]] == [(None, "SQL inbox")]


async def test_functions_that_everybody_may_call_are_reported(database: str, delayer: Run) -> None:
    """As after `pg_restore --no-privileges`."""

    def found() -> list[str]:
        checks = json.loads(delayer("check", "--json", expect=1).stdout)["checks"]
        return [row["found"] for row in checks if row["what"] == "rights"]

    delayer("topology", "apply")
    assert found() == []
    async with sql(database) as admin:
        await admin.execute("GRANT EXECUTE ON FUNCTION delayer_cancel TO PUBLIC")
        assert found() == ["every role may call 1 function of the SQL inbox, as after `pg_restore -x`"]
        await admin.execute("REVOKE ALL ON FUNCTION delayer_cancel FROM PUBLIC")
        assert found() == []
