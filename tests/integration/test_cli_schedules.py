"""Schedules by the command line, on a real store."""

from __future__ import annotations

import json
import re
import shlex
from datetime import datetime
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from click.testing import Result

from delayer.amqp.properties import encode_headers, entry, long_string
from delayer.schedule.schedule import ScheduleState
from delayer.schedule.zone_data import zone_data, zone_directories
from delayer.store import held_messages, pool
from delayer.store.admin import audit_log
from delayer.store.schedules import changes
from delayer.store.schedules.zones import ZoneWatch
from tests.integration.cli import Run, ids
from tests.integration.test_schedules import claimed, scene
from tests.support.fakes import WHY
from tests.support.rows import conserved
from tests.support.schedules import HOUR_MS, check_waiting, record, rewind, schedule
from tests.support.store import opened, owned, parcel, sql

BERLIN = ["berlin", "--cron", "30 2 * * *", "--zone", "Europe/Berlin", "--to", "delayer.out", "--routing-key", "k"]
TICK = ["tick", "--every", "1h", "--to", "delayer.out", "--routing-key", "k", "--body", "tick"]
FILE = """
[schedule.tick]
every = "1h"
to = "delayer.out"
routing_key = "k"
body = "tick"

[schedule.report]
cron = "0 7 * * MON-FRI"
zone = "America/New_York"
to = "delayer.out"
"""


def read(run: Run, *arguments: str) -> dict[str, Any]:
    return json.loads(run("schedule", *arguments, "--json").stdout)


async def test_a_schedule_from_its_first_occurrence_to_its_end(delayer: Run, database: str) -> None:
    told = delayer("schedule", "add", *TICK).stdout
    assert told.startswith("Added tick: Every hour; next: 20")
    shown = read(delayer, "show", "tick")
    assert ids(delayer, "list", "--delay-key", "delayer.schedule/tick") == [shown["next_message"]]
    assert (shown["rhythm"], shown["every_ms"], shown["to_exchange"], shown["to_key"], shown["body"]) == (
        "Every hour", 3_600_000, "delayer.out", "k", "tick",
    )  # fmt: skip
    text = delayer("schedule", "show", "tick").stdout
    assert "Every hour" in text
    assert shown["next_message"] in text
    assert delayer("schedule", "edit", "tick", "--every", "2h", "--body", "tock").stdout.startswith(
        "Changed tick: Every 2"
    )
    assert delayer("schedule", "pause", "tick").stdout == "Paused tick: Every 2 hours; paused.\n"
    assert delayer("schedule", "pause", "tick").stdout == "tick is paused already.\n"
    assert read(delayer, "show", "tick")["next_message"] is None
    assert read(delayer, "resume", "tick")["state"] == "active"
    assert delayer("schedule", "resume", "tick").stdout == "tick is active already.\n"
    assert delayer("schedule", "run", "tick").stdout.startswith("Parked one message of tick, due now: id:")
    assert len(ids(delayer, "list")) == 2
    async with sql(database) as connection:
        assert (await check_waiting(connection, "tick")).schedule.body == b"tock"
        verbs = [one.verb for one in reversed(await audit_log.list_entries(connection, 10))]
    assert verbs == [f"schedule {verb}" for verb in ("add", "edit", "pause", "resume", "run")]
    assert delayer("schedule", "remove", "tick").stdout == "Removed tick.\n"
    assert len(ids(delayer, "list")) == 1, "the message of run stays"
    assert delayer("schedule", "list").stdout == "There are no schedules.\n"
    async with sql(database) as connection:
        await conserved(connection)


async def test_schedules_are_listed_page_by_page(delayer: Run) -> None:
    for name in ("c", "a", "b"):
        delayer("schedule", "add", name, *TICK[1:], *(["--paused"] if name == "b" else []))
    lines = delayer("schedule", "list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["name", "a", "b", "c"]
    first = delayer("schedule", "list", "--limit", "2")
    assert len(first.stdout.splitlines()) == 3
    assert "--after b" in first.stderr
    assert [one["name"] for one in read(delayer, "list", "--after", "b")["schedules"]] == ["c"]
    assert [one["name"] for one in read(delayer, "list", "--state", "paused")["schedules"]] == ["b"]
    assert delayer("schedule", "list", "--state", "failed").stdout == "No schedules match.\n"


async def test_a_preview_has_both_clocks_and_the_distances(delayer: Run) -> None:
    delayer("schedule", "add", *BERLIN)
    times = read(delayer, "preview", "berlin", "--count", "400")["times"]
    assert len(times) == 400
    gaps = {one["after_ms"] for one in times[1:]}
    assert gaps == {half_hours * 1_800_000 for half_hours in (47, 48, 50)}, "03:00 in spring, and once in autumn"
    for one in times:
        local = datetime.fromisoformat(one["local"])
        assert local.timestamp() * 1000 == datetime.fromisoformat(one["utc"]).timestamp() * 1000 == one["at_ms"]
        assert (local.hour, local.minute) == ((2, 30) if local.hour == 2 else (3, 0))
    text = delayer("schedule", "preview", "berlin").stdout.splitlines()
    assert text[0] == "berlin: At 02:30 every day (Europe/Berlin)"
    assert text[1].split() == ["Europe/Berlin", "UTC", "after"]
    assert len(text) == 7
    assert times[0]["at_ms"] == read(delayer, "show", "berlin")["next_ms"]


async def test_a_preview_ends_with_the_schedule(delayer: Run) -> None:
    delayer("schedule", "add", *TICK, "--max", "2", "--paused")
    told = delayer("schedule", "preview", "tick")
    assert [len(line.split()) for line in told.stdout.splitlines()[1:]] == [2, 1, 3], (
        "one column of UTC, and the distance"
    )
    assert told.stdout.splitlines()[1].split() == ["UTC", "after"]
    assert "delayer schedule resume tick" in told.stderr
    assert "No other time follows." in told.stderr


async def test_mistakes_and_missing_names(delayer: Run, database: str) -> None:
    told = delayer("schedule", "add", "tick!", "--cron", "61 * * * *", "--zone", "Berlin", "--to", "x", expect=2).stderr
    for text in ("name: expected 1 to 100", "cron: minute: expected 0 to 59", "did you mean Europe/Berlin?"):
        assert text in told, told
    delayer("schedule", "add", *TICK)
    assert "edit it instead" in delayer("schedule", "add", *TICK, expect=2).stderr
    for verb in ("show", "pause", "resume", "remove", "run", "preview"):
        told = delayer("schedule", verb, "tack", expect=1).stderr
        assert "expected a schedule of this store, found 'tack'; see `delayer schedule list`" in told
    delayer("schedule", "edit", "tack", "--every", "1s", expect=1)
    assert "last: expected a time" in delayer("schedule", "edit", "tick", "--last", "2020-01-01", expect=2).stderr
    async with sql(database) as connection:
        assert (await record(connection)).schedule.last_ms is None


async def test_every_mistake_is_named_at_once(delayer: Run) -> None:
    told = delayer(
        "schedule", "add", "tick!", "--every", "5", "--first", "soon", "--max", "9" * 19, "--jitter", "2d",
        "--header", "a", "--property", "priority=900", "--catch-up", "5000", "--body", "x", "--body-file", "-",
        expect=2,
    ).stderr  # fmt: skip
    assert "10 mistakes" in told
    fields = {line.strip().partition(":")[0] for line in told.splitlines()[1:]}
    assert fields == {
        "every", "first", "properties", "headers", "body", "to", "name", "jitter", "catch_up", "max",
    }  # fmt: skip
    told = delayer("schedule", "edit", "tick", "--every", "5", "--catch-up", "never", expect=2).stderr
    assert "2 mistakes" in told
    beyond = delayer("schedule", "add", *TICK, "--max", str(1 << 63), expect=2).stderr
    assert "max: expected 1 to 9223372036854775807 occurrences, found 9223372036854775808" in beyond
    assert delayer("schedule", "list").stdout == "There are no schedules.\n"


@pytest.mark.parametrize("name", ["a\0b", "\udcff", "a b", "x" * 101])
async def test_a_name_that_no_schedule_can_have_is_a_mistake(delayer: Run, name: str, tmp_path: Path) -> None:
    for command in (["add", name, *TICK[1:]], ["edit", name, "--max", "5"], ["list", "--after", name]):
        told = delayer("schedule", *command, expect=2).stderr
        assert "1 to 100 letters, digits, dots, dashes and underscores" in told
    for verb in ("show", "pause", "resume", "remove", "run", "preview"):
        assert "1 to 100 letters" in delayer("schedule", verb, name, expect=2).stderr
    file = tmp_path / "schedules.toml"
    file.write_text(f'[schedule."{name.encode("unicode_escape").decode().replace(chr(92) + "x", chr(92) + "u00")}"]\n')
    assert "nothing was changed" in delayer("schedule", "apply", str(file), expect=2).stderr


async def test_apply_makes_the_store_equal_to_a_file(delayer: Run, database: str, tmp_path: Path) -> None:
    file = tmp_path / "schedules.toml"
    file.write_text(FILE)
    delayer("schedule", "add", *TICK[:-1], "old")
    delayer("schedule", "add", *BERLIN)
    delayer("schedule", "pause", "tick")
    planned = delayer("schedule", "apply", str(file), "--dry-run", "--prune").stdout
    assert planned == (
        "+ report: At 07:00 on Monday through Friday (America/New_York)\n"
        "~ tick\n"
        "    body: old \\u2192 tick\n"
        "- berlin: At 02:30 every day (Europe/Berlin)\n"
        "Would be: 1 added, 1 changed, 1 removed; 0 as they were.\n"
    ).replace("\\u2192", "→")
    names = ["berlin", "tick"]
    assert [one["name"] for one in read(delayer, "list")["schedules"]] == names, "nothing has changed"
    assert delayer("schedule", "apply", str(file)).stdout.endswith("\n1 added, 1 changed, 0 removed; 0 as they were.\n")
    difference = read(delayer, "apply", str(file), "--prune")
    assert (difference["removed"], difference["same"], difference["changed"]) == (["berlin"], ["tick", "report"], [])
    async with sql(database) as connection:
        tick = await check_waiting(connection, "tick")
        assert (tick.state, tick.schedule.body) == (ScheduleState.PAUSED, b"tick"), "a pause outlives this"
        await check_waiting(connection, "report")
    assert (
        delayer("schedule", "apply", "-", stdin=FILE.encode()).stdout
        == "0 added, 0 changed, 0 removed; 2 as they were.\n"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            '[schedule.tick]\nevery = "1ms"\nto = "x"\n[schedule.a]\nevery = "1h"\nto = "x"',
            "tick: every: expected 1s to",
        ),
        ("[schedule.tick]\nevery = 1", 'tick: every: expected a duration in whole numbers such as "250ms"'),
        ("", "--prune would remove every schedule"),
    ],
)
async def test_a_wrong_file_changes_nothing(delayer: Run, tmp_path: Path, text: str, expected: str) -> None:
    delayer("schedule", "add", *BERLIN)
    file = tmp_path / "schedules.toml"
    file.write_text(text)
    assert expected in delayer("schedule", "apply", str(file), "--prune", expect=2).stderr
    assert [one["name"] for one in read(delayer, "list")["schedules"]] == ["berlin"]


async def test_apply_names_what_does_not_go_on(delayer: Run, database: str, tmp_path: Path) -> None:
    file = tmp_path / "schedules.toml"
    file.write_text(FILE)
    delayer("schedule", "apply", str(file))
    assert read(delayer, "apply", str(file))["stopped"] == []
    async with sql(database) as connection:
        for name, state, why in (("tick", "ended", "it has had its 3 occurrences"), ("report", "failed", "no zone")):
            await connection.execute(
                "UPDATE schedule SET state = $2, why = $3, waiting_id = NULL, waiting_at = NULL WHERE name = $1",
                *(name, state, why),
            )
    told = delayer("schedule", "apply", str(file))
    assert told.stdout == "0 added, 0 changed, 0 removed; 2 as they were.\n"
    assert told.stderr.splitlines() == [
        "tick is ended: it has had its 3 occurrences. Next: if it shall go on, change its last or its max in the file; "
        "else remove it.",
        "report is failed: no zone. Next: correct that; then `delayer schedule resume report`.",
    ]
    stopped = read(delayer, "apply", str(file))["stopped"]
    assert [(one["name"], one["state"]) for one in stopped] == [("tick", "ended"), ("report", "failed")]


async def test_held_occurrences_are_counted(delayer: Run, database: str, tmp_path: Path) -> None:
    async with scene(database, lanes=1) as ([lane], admin):
        await changes.apply(admin, [schedule(), schedule("tick2")], who="me")
        await changes.run_now(admin, "tick", who="me")
        await rewind(admin, HOUR_MS)
        await lane.scan()
        _, dues = await claimed([lane])
        await lane.claimers[0].settle([], [(due, WHY) for due in dues])
    assert len(dues) == 2
    assert (read(delayer, "show", "tick")["held"], read(delayer, "show", "tick2")["held"]) == (2, 0)
    assert [one["held"] for one in read(delayer, "list")["schedules"]] == [2, 0]
    rows = delayer("schedule", "list").stdout.splitlines()
    assert [row.split()[-1] for row in rows] == ["held", "2", "0"]
    command = "delayer held list --header x-delayer-schedule=tick"
    shown = delayer("schedule", "show", "tick").stdout
    assert f"2: `{command}` says why" in shown
    assert [line.split() for line in shown.splitlines() if "last sent" in line] == [["last", "sent", "–", "(held)"]]
    assert " - " not in delayer("schedule", "list").stdout, "one sign for none"
    assert len(json.loads(delayer(*command.split()[1:], "--json").stdout)["messages"]) == 2
    (tmp_path / "schedules.toml").write_text("[schedule.report]\nevery = '1h'\nto = 'delayer.out'\n")
    prune = ("schedule", "apply", "--prune", "--dry-run", str(tmp_path / "schedules.toml"))
    pruned = delayer(*prune)
    assert pruned.stderr == "Held messages of removed schedules remain: 2. Next: `delayer held list`.\n"
    assert json.loads(delayer(*prune, "--json").stdout)["held"] == 2
    removed = delayer("schedule", "remove", "tick")
    assert (removed.stdout, removed.stderr) == (
        "Removed tick.\n", f"Held messages of it remain: 2. Next: `{command}`.\n",
    )  # fmt: skip
    assert read(delayer, "remove", "tick2") == {"removed": "tick2", "held": 0}


async def test_held_messages_without_the_name_of_a_schedule_are_not_counted(delayer: Run, database: str) -> None:
    """Such as one whose headers end where the length of the name would be."""
    header = b"\x12x-delayer-scheduleS\0\0\0"
    texts = (header, header + b"\x09cut", b"x-delayer-schedule")
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin:
        await changes.add(admin, schedule(), who="me")
        odd = [encode_headers(entry(b"x", long_string(text)))[:-1] for text in texts]  # Cut off behind the headers.
        assert odd[0].endswith(header)
        await store.hold(lane, [(parcel(0, route=b"", properties=properties), WHY) for properties in odd])
        assert (await held_messages.count_by_schedule(admin)).get("tick", 0) == 0


@pytest.mark.parametrize("command", ["show", "preview"])
async def test_a_look_at_a_schedule_opens_one_connection(
    delayer: Run, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    delayer("schedule", "add", *TICK)
    connect, opened = pool.connect, []

    async def counted(*arguments: Any, **more: Any) -> asyncpg.Connection:
        opened.append(arguments)
        return await connect(*arguments, **more)

    monkeypatch.setattr(pool, "connect", counted)
    delayer("schedule", command, "tick")
    assert len(opened) == 1


async def test_lists_name_the_schedule_of_a_message(delayer: Run) -> None:
    delayer("schedule", "add", *TICK)
    delayer("schedule", "run", "tick")
    assert delayer("list").stdout.count("(schedule tick)") == 2
    for one in ids(delayer, "list"):
        assert re.search(r"^route +\(schedule tick\)$", delayer("show", one).stdout, re.M)


async def test_check_names_the_version_of_the_zone_data(delayer: Run, database: str) -> None:
    assert not any(row["what"] == "zone data" for row in checked(delayer))
    data = zone_data(zone_directories())
    assert data is not None
    for newest, result in ((data.version, "ok"), ("2099a", "note")):
        async with sql(database) as connection:
            await connection.execute("UPDATE store SET zone_version = $1", newest)
        [row] = [row for row in checked(delayer) if row["what"] == "zone data"]
        assert row["result"] == result
        assert data.version in row["found"]
        assert (newest in row["found"]) or result == "ok"


async def test_check_names_the_daemons_with_other_zone_data(delayer: Run, database: str, tmp_path: Path) -> None:
    data = zone_data(zone_directories())
    assert data is not None
    (tmp_path / "UTC").touch()
    (tmp_path / "tzdata.zi").write_text("# version 1999a\n")
    async with opened(database, owner="here:1") as one, opened(database, owner="there:2") as other:
        other.zones = ZoneWatch(lambda: [tmp_path])
        for store in (one, other):
            await store.locks.look()  # Before the first upkeep, as a daemon does.
            await store.maintain()
            await store.locks.look()
        [row] = [row for row in checked(delayer) if row["what"] == "zone data"]
        assert (row["result"], row["found"]) == (
            "note",
            f"{data.version} in {data.path}; the schedules of this store use 1999a; {data.version} on here:1",
        )
        (tmp_path / "tzdata.zi").write_text(f"# version {data.version}\n")
        await other.maintain()
        await other.locks.look()
        assert [row["result"] for row in checked(delayer) if row["what"] == "zone data"] == ["ok"]


async def test_check_names_a_schedule_that_failed(delayer: Run, database: str) -> None:
    delayer("schedule", "add", *BERLIN)
    assert not any(row["what"] == "schedule" for row in checked(delayer))
    async with sql(database) as connection:
        await connection.execute(
            "UPDATE schedule SET state = 'failed', why = 'no such zone', waiting_id = NULL, waiting_at = NULL"
        )
    [row] = [row for row in checked(delayer) if row["what"] == "schedule"]
    assert (row["result"], row["found"]) == ("off", '"berlin" sends nothing: no such zone')
    assert "schedule resume berlin" in row["advice"]


def checked(run: Run) -> list[dict[str, str]]:
    """The rows of `delayer check`, which fails here for other reasons."""
    return json.loads(run("check", "--json", expect=1).stdout)["checks"]


PAGE = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text()
TIMES = re.compile(
    r"\d{4}-\d\d-\d\dT[\d:]+(?:Z|[+-]\d\d:\d\d)| \((?:in .*|now)\)|\b\d+ (?:d|h)(?: \d+ (?:h|min))?"
    r"|id:\S+|[0-9a-f-]{36}"
)


def plain(text: str) -> list[str]:
    """The output without times, ids and widths of columns."""
    return [" ".join(TIMES.sub("…", line).split()) for line in text.splitlines()]


async def test_the_page_shows_what_the_commands_print(
    delayer: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    [file] = re.findall(r"^```toml\n(.*?)^```$", PAGE, flags=re.M | re.S)
    (tmp_path / "schedules.toml").write_text(file)
    consoles = "".join(re.findall(r"^```console\n(.*?)^```$", PAGE, flags=re.M | re.S))
    commands = re.findall(r"^\$ delayer (.*)\n((?:[^$\n].*\n)*)", consoles, flags=re.M)
    assert len(commands) == 10
    for command, shown in commands:
        assert plain(delayer(*shlex.split(command)).stdout) == plain(shown), command


CRONTAB = b"MAILTO=ada\n0 7 * * 1-5 /usr/bin/report --all\n*/5 * * * * cleanup\n@reboot start\n"


async def test_a_crontab_is_brought_in_once(delayer: Run) -> None:
    def bring(*more: str, expect: int = 1) -> Result:
        options = ("--zone", "Europe/Berlin", "--to", "jobs", *more)
        return delayer("schedule", "import", "crontab", "-", *options, stdin=CRONTAB, expect=expect)

    planned = bring("--dry-run")
    assert planned.stdout == (
        "+ report: At 07:00 on Monday through Friday (Europe/Berlin)\n"
        "+ cleanup: Every fifth minute of every hour (Europe/Berlin)\n"
        "Would be added: 2 schedules.\n"
    )
    assert "Not translated: line 1: MAILTO=" in planned.stderr
    assert "Not translated: line 4: @reboot" in planned.stderr
    assert read(delayer, "list")["schedules"] == []
    assert bring().stdout.endswith("\nAdded: 2 schedules.\n")
    assert bring().stdout == "Added: 0 schedules; there already: 2.\n"
    assert read(delayer, "show", "report")["body"] == "/usr/bin/report --all"
    delayer("schedule", "edit", "report", "--body", "x")
    assert "found the schedule report, which is another one; use --prefix" in bring(expect=2).stderr
    assert "+ web1-report: " in bring("--prefix", "web1-").stdout
    assert "did you mean Europe/Berlin?" in bring("--zone", "Berlin", expect=2).stderr


async def test_beat_s_file_is_brought_in(delayer: Run) -> None:
    file = Path(__file__).parents[1] / "unit" / "imports" / "beat" / "celerybeat-schedule"
    told = delayer("schedule", "import", "beat", str(file), expect=1)
    assert told.stdout.endswith("\nAdded: 5 schedules.\n")
    assert "Not translated: sun: solar:" in told.stderr
    assert read(delayer, "show", "report")["zone"] == "Europe/Berlin"
    assert "expected beat's file" in delayer("schedule", "import", "beat", "/nowhere", expect=2).stderr
