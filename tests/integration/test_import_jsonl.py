"""Backlogs in files: `delayer export` and `delayer import jsonl`, from one store into another, exact to the byte. A
real broker produces the delayed-message plugin's dump as in docs/importing.md.

Debian's brokers have no such plugin: a table of the same name and shape replaces its table. The broker's own code
creates the messages, in its version's format.
"""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import json
import os
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import pytest

from delayer.cli.errors import ExitCode
from delayer.core.hold import Hold, HoldKind
from delayer.core.importing import ImportSelection
from delayer.core.message import Parcel, Target
from delayer.core.topology import Exchange, Topology
from delayer.core.units import DAY_MS
from delayer.imports.brokers import Destinations
from delayer.imports.files import DelayedExchange
from delayer.imports.state_machine import ImportImpossible, run
from delayer.store.admin.importing import ImportStore
from tests.integration.cli import Run
from tests.integration.test_export_snapshot import hold
from tests.support.daemon import EXECUTABLE
from tests.support.rabbitmq import RabbitMQ
from tests.support.raw import Props, array, number, text
from tests.support.rows import compact, conserved
from tests.support.servers import Postgres
from tests.support.store import opened, owned, parcel, sql
from tests.support.topology import declare

_CONTENT = "due_at, checksum, route, exchange, routing_key, to_exchange, to_key, properties, body, key"


@asynccontextmanager
async def other_store(postgres: Postgres) -> AsyncIterator[str]:
    name = postgres.add_store()
    try:
        yield postgres.url(name)
    finally:
        postgres.drop_database(name)


async def content(admin: asyncpg.Connection) -> list[tuple[object, ...]]:
    """The waiting and held messages, without the columns that a store adds."""
    waiting = await admin.fetch(f"SELECT {_CONTENT}, NULL AS reason, NULL AS token FROM message")
    held = await admin.fetch(f"SELECT {_CONTENT}, kind, reason, may_be_delivered, isolated, token FROM held")
    return sorted((tuple(row) for row in (*waiting, *held)), key=repr)


def letters(count: int, now_ms: int, chance: random.Random) -> list[Parcel]:
    """Messages of all kinds: some are equal, some have keys, and all fields contain non-text bytes."""

    def name(longest: int) -> bytes:
        return chance.choice([b"orders", "ö☃".encode(), chance.randbytes(chance.randrange(longest))])

    def one(n: int) -> Parcel:
        return Parcel(
            now_ms + chance.randrange(3, 500) * DAY_MS, name(200), name(200), name(200), Target(b"", b"inbox"),
            b"\x10\x00\x02", chance.randbytes(chance.choice([0, 10, 3_000])), b"key-%d" % n if n % 7 == 0 else None,
        )  # fmt: skip

    made = [one(n) for n in range(count)]
    return [*made, made[1]._replace(key=None), made[1]._replace(key=None)]


async def test_round_trip(delayer: Run, database: str, postgres: Postgres, tmp_path: Path) -> None:
    """Rows, segments and held messages, with their keys. Damaged messages stay damaged, and are held."""
    file = tmp_path / "backlog.jsonl"
    async with opened(database) as place, owned(place) as [lane], sql(database) as admin:
        await place.park(lane, letters(200, place.now_upper_ms(), random.Random(1)), [])
        await compact(admin, after_ms=place.now_upper_ms() + 100 * DAY_MS)
        held = [one._replace(key=one.key and b"held " + one.key) for one in letters(5, 0, random.Random(2))]
        held[0] = held[0]._replace(token=b"30a6aca3c8ea4ae8a9a83c9bd2a3c2ab")  # the id of a publish before the hold
        await place.hold(
            lane,
            [
                (one, Hold(kind, f"reason {n} ☃", may_be_delivered=n % 2 == 0, isolated=n % 3 == 0))
                for n, (one, kind) in enumerate(zip(held, HoldKind, strict=False))
            ],
        )
        await place.park(lane, letters(30, place.now_upper_ms() + DAY_MS, random.Random(3)), [])
        there = {"message": await admin.fetchval("SELECT count(*) FROM message"), "in segments": 0}
        there["in segments"] = await admin.fetchval("SELECT sum(messages) FROM segment")
        assert min(there.values()) > 0, there
        delayer("export", str(file))
        delayer("export", str(file), expect=2)
        delayer("export", str(file), "--force")
        assert file.stat().st_mode & 0o077 == 0
        link = tmp_path / "link"
        link.symlink_to(file)
        delayer("export", str(link), expect=2)
        delayer("export", str(link), "--force")
        assert link.is_symlink()
        os.mkfifo(tmp_path / "pipe")
        with concurrent.futures.ThreadPoolExecutor() as reading:
            piped = reading.submit((tmp_path / "pipe").read_bytes)
            delayer("export", str(tmp_path / "pipe"))
            assert piped.result(10) == file.read_bytes()
        assert (tmp_path / "pipe").is_fifo()
        lines = file.read_bytes().splitlines()
        assert json.loads(lines[-1]) == {"v": 1, "messages": sum(there.values()) + 7}
        dues = [json.loads(line)["due_ms"] for line in lines[: sum(there.values())]]
        assert dues == sorted(dues)
    async with other_store(postgres) as target:
        args = ("import", "jsonl", "run", str(file), "--unverified", "--json", "--yes")
        report = json.loads(delayer(*args, expect=1, DELAYER_STORE__URL=target).stdout)
        assert (report["parked"], report["held"], report["phase"]) == (sum(there.values()), 7, "done")
        again = tmp_path / "again.jsonl"
        delayer("export", str(again), DELAYER_STORE__URL=target)
        assert sorted(again.read_bytes().splitlines()) == sorted(lines)
        async with opened(target) as place, sql(target) as admin:
            assert await content(admin) == await content_unpacked(database)
            await conserved(admin)
            assert await admin.fetchval("SELECT count(*) FROM import_item") == 0


async def content_unpacked(database: str) -> list[tuple[object, ...]]:
    """The content of a store after a restore of all segments."""
    from delayer.store.segments import catalog, restore

    async with sql(database) as admin:
        for segment in await catalog.list_segments(admin):
            await restore.restore(admin, segment.id)
        return await content(admin)


@pytest.mark.words
async def test_damaged_records_are_held(delayer: Run, tmp_path: Path, database: str) -> None:
    file = tmp_path / "backlog.jsonl"
    async with opened(database) as place, owned(place) as [lane], sql(database) as admin:
        await place.park(lane, letters(3, place.now_upper_ms(), random.Random(1)), [])
        await admin.execute("UPDATE message SET body = 'tampered' WHERE id = 2")
        delayer("export", str(file))
        await admin.execute("TRUNCATE message")
        delayer("import", "jsonl", "run", str(file), "--unverified", "--yes", expect=1)
        assert await admin.fetchval("SELECT count(*) FROM message") == 4
        [(body, reason, retry_ms)] = await admin.fetch("SELECT body, reason, retry_at FROM held")
        assert (body, "checksum" in reason) == (b"tampered", True)
        assert retry_ms is None, "sent by itself it would be taken for sound"


@pytest.mark.words
async def test_messages_for_missing_destinations_are_held(delayer: Run, database: str, tmp_path: Path) -> None:
    delayer("topology", "apply")
    file = tmp_path / "hand-made.jsonl"
    rows = [
        {"v": 1, "due_ms": 4_000_000_000_000 + n, "to_exchange": "", "to_key": key, "body": f"{n}"}
        for n, key in enumerate(["delays.refused", "gone@HOST", "delays.refused@HOST", "gone"])
    ]
    text = "\n".join(json.dumps(row) for row in rows)
    misspelt = json.dumps({"v": 1, "due_ms": 4_000_000_000_009, "routing_key": "delays.refused", "boddy": "4"})
    file.write_text(f"{text}\n\nnonsense\n{misspelt}\n")
    args = (str(file), "--cutoff", "2096-10-02T07:06:40.001Z", "--rewrite-destination", "s/@.*//", "--json")
    seen = json.loads(delayer("import", "jsonl", "preview", *args, expect=1).stdout)
    assert (seen["messages"], seen["would_be_held"]) == (3, 2)
    assert seen["held_because"] == {"import: there is no such queue or exchange": 2}
    assert seen["left"] == {"due before the cutoff": 1, "unreadable": 2}
    assert "line 6 is unreadable" in seen["remarks"][0]
    assert "line 7 is unreadable: expected a known field, found 'boddy' (did you mean body?)" in seen["remarks"]
    assert json.loads(delayer("import", "jsonl", "run", *args, "--dry-run", expect=1).stdout) == seen
    async with sql(database) as admin:
        assert await admin.fetchval("SELECT count(*) FROM import_run") == 0
        delayer("import", "jsonl", "run", *args, expect=2)  # no terminal to prompt on
        delayer("import", "jsonl", "run", *args, "--yes", "--limit", "2", expect=1)
        assert [tuple(row) for row in await admin.fetch("SELECT to_key, body FROM message")] == [
            (b"delays.refused", b"2")
        ]
        [held] = await admin.fetch("SELECT to_key, reason, retry_at, due_at FROM held")
        assert (held["to_key"], held["reason"]) == (b"gone", "import: there is no such queue or exchange")
        assert held["retry_at"] == held["due_at"], "an operator may declare the queue long before that"
    nobody = {"DELAYER_BROKER__URL": "amqp://guest:s3cret@127.0.0.1:1/"}
    told = delayer("import", "jsonl", "run", *args, "--yes", "--again", expect=1, **nobody).stderr
    assert "Nothing was moved" in told
    assert "s3cret" not in told


async def test_missing_and_cut_files_are_reported(delayer: Run, tmp_path: Path) -> None:
    assert "No such file" in delayer("import", "jsonl", "preview", str(tmp_path / "nothing"), expect=3).stderr
    cut = tmp_path / "cut.jsonl"
    cut.write_text('{"v":1,"due_ms":1}\n{"v":1,"messages":2}\n')
    assert "expected 2 messages" in delayer("import", "jsonl", "run", str(cut), "--yes", expect=1).stderr
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    assert "0 parked" in delayer("import", "jsonl", "run", str(empty), "--yes").stdout


def test_a_run_reports_possible_gaps_and_repeats(delayer: Run, tmp_path: Path) -> None:
    """Only the last line shows a cut between lines. An operator may import a file a second time."""
    file = tmp_path / "head.jsonl"
    file.write_text('{"v":1,"due_ms":4000000000000,"routing_key":"queue","body":"text"}\n')
    run = ("import", "jsonl", "run", str(file), "--unverified", "--yes")
    first = delayer(*run).stderr
    assert "so it may have been cut" in first
    assert "of this very file" not in first
    look = ("import", "jsonl", "preview", str(file), "--unverified", "--json")
    seen = json.loads(delayer(*look, expect=1).stdout)
    assert "import 1 brought 1 message of this very file" in seen["remarks"][-1]
    assert "Next: --again" in seen["refused"]
    assert json.loads(delayer(*run, "--again", "--dry-run", "--json").stdout)["refused"] is None
    refused = delayer(*run, expect=1).stderr
    assert "import 1 brought 1 message of this very file" in refused
    assert "--again" in refused
    assert "import 1 brought 1 message of this very file" in delayer(*run, "--again").stderr


def names(directory: Path) -> list[str]:
    return [one.name for one in directory.iterdir()]


async def test_a_full_disk_keeps_no_part_of_an_export(delayer: Run, database: str, tmp_path: Path) -> None:
    """The error names the file, not the store or the command line, and the file before it stays."""
    async with opened(database) as place, owned(place) as [lane]:
        await place.park(lane, letters(200, place.now_upper_ms(), random.Random(1)), [])
    file = tmp_path / "backlog.jsonl"
    file.write_text("of yesterday")
    line = f'ulimit -f 16; exec "{EXECUTABLE}" --config /dev/null --store-url "{database}" export --force "{file}"'
    done = await asyncio.create_subprocess_exec("sh", "-c", line, stderr=asyncio.subprocess.PIPE)
    _, said = await done.communicate()
    assert done.returncode == ExitCode.OUT_OF_REACH
    assert said.decode().startswith(f"delayer: {file}: File too large: nothing of it is kept. Next: make room")
    assert (names(tmp_path), file.read_text()) == ([file.name], "of yesterday")
    elsewhere = tmp_path / "nowhere" / "backlog.jsonl"
    assert "No such file or directory" in delayer("export", str(elsewhere), expect=ExitCode.USAGE).stderr


async def test_a_file_changed_during_an_import_brings_nothing(database: str, tmp_path: Path) -> None:
    """Only the bodies change: positions and due instants stay the same."""
    file = tmp_path / "dump"

    def write(body: bytes) -> None:
        line = b" ".join((b"4000000000000", *map(base64.b64encode, (b"v", b"x", b"q", b"\x10\0\2", body)))) + b"\n"
        file.write_bytes(line * 5 + b"5\n")

    def say(step: str, *_: int | None) -> None:
        if step == "importing":
            write(b"evil")

    write(b"good")
    async with ImportStore.open(database) as book, sql(database) as admin:
        for why in ("it changed since it was staged", r"begun with other parameters \(sha256"):
            source = DelayedExchange(path=file, notes=book, meant=ImportSelection(), vhost=b"v")
            with pytest.raises(ImportImpossible, match=why):
                await run(source, book, Destinations("", None, verified=False), "me", say)
            await source.close()
        assert await admin.fetchval("SELECT count(*) FROM message") == 0


UNFIT = {
    "jsonl": b'{"v":1,"due_ms":4000000000000,"to_key":"q","body":"x","crc":1}\n{"v":1,"messages":1}\n',
    "nservicebus-raven": b'{"Id": "1", "Destination": "", "Time": "2090-01-01T00:00:00Z", "State": ""}\n',
}
UNREADABLE = {"jsonl": b"{\n", "nservicebus-raven": b"{\n", "delayed-exchange": b"1 2 3\n1\n"}
CLEAN = {
    "jsonl": b'{"v":1,"due_ms":4000000000000,"to_key":"q","body":"x"}\n{"v":1,"messages":1}\n',
    "nservicebus-raven": b'{"Id": "1", "Destination": "q", "Time": "2090-01-01T00:00:00Z", "State": ""}\n',
    "delayed-exchange": b"4000000000000 dg== eA== cQ== EAAC eA==\n1\n",
}


def test_a_look_ends_as_the_run_will(delayer: Run, tmp_path: Path) -> None:
    for code, some in ((ExitCode.FOUND, UNFIT), (ExitCode.FOUND, UNREADABLE), (ExitCode.DONE, CLEAN)):
        for source, content in some.items():
            file = tmp_path / source
            file.write_bytes(content)
            more = ("--vhost", "v") if source == "delayed-exchange" else ()
            words = (str(file), *more, "--unverified", "--json")
            seen = json.loads(delayer("import", source, "preview", *words, expect=code).stdout)
            delayer("import", source, "run", "--dry-run", *words, expect=code)
            report = json.loads(delayer("import", source, "run", "--yes", *words, expect=code).stdout)
            assert seen["held_because"] == report["held_because"], source
            assert (seen["messages"], seen["left"]) == (report["staged"], report["left"]), source


@pytest.mark.words
def test_a_preview_of_a_limit_reads_the_whole_file(delayer: Run, tmp_path: Path) -> None:
    file = tmp_path / "backlog.jsonl"
    rows = [
        {"v": 1, "due_ms": 4_000_000_000_000 - n, "to_key": f"{n}", "held": {"kind": "nacked", "text": f"why {n}"}}
        for n in range(300)
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    words = ("import", "jsonl", "preview", str(file), "--unverified", "--json", "--limit", "1")
    seen = json.loads(delayer(*words, expect=ExitCode.FOUND).stdout)
    assert (seen["messages"], seen["left"], seen["first_due_ms"]) == (1, {"beyond the limit": 299}, rows[-1]["due_ms"])
    assert (len(seen["destinations"]), seen["would_be_held"], sum(seen["held_because"].values())) == (300, 1, 300)
    assert seen["held_because"]["for other reasons"] == 200


def keyed(due_ms: int, key: str, body: str) -> dict[str, object]:
    return {"v": 1, "due_ms": due_ms, "to_key": "q", "key": key, "body": body}


async def test_a_waiting_message_wins_over_an_imported_one_of_its_key(
    delayer: Run, database: str, tmp_path: Path
) -> None:
    file = tmp_path / "backlog.jsonl"
    due_ms = 4_000_000_000_000
    rows = [keyed(due_ms + n, f"order-{n}", "old") for n in range(4)]
    rows.append(keyed(due_ms + 9, "order-3", "later in the file"))
    file.write_text("\n".join(map(json.dumps, [*rows, {"v": 1, "messages": len(rows)}])))
    words = (str(file), "--unverified", "--json")
    async with opened(database) as place, owned(place) as [lane], sql(database) as admin:
        now = place.now_upper_ms()
        new = [
            Parcel(now + DAY_MS, b"", b"", b"q", Target(b"", b"q"), b"\x10\0\2", b"new", b"order-%d" % n)
            for n in (0, 1)
        ]
        await place.park(lane, new[:1], [])
        await place.park(lane, new[1:], [])
        await admin.execute("UPDATE message_key SET id = -1 WHERE key = 'order-1'")  # and one key without a message
        report = json.loads(delayer("import", "jsonl", "run", *words, "--yes", expect=ExitCode.FOUND).stdout)
        assert (report["parked"], report["held"], report["superseded"], report["staged"]) == (3, 0, 2, 5)
        waiting = await admin.fetch("SELECT right(encode(key, 'escape'), 1), body FROM message ORDER BY key, body")
        assert [key.encode() + b" " + body for key, body in waiting] == [
            b"0 new",
            b"1 new",
            b"1 old",
            b"2 old",
            b"3 old",
        ]
        [(verb, messages, asked)] = await admin.fetch("SELECT verb, messages, asked FROM audit_log")
        assert (verb, messages) == ("import superseded", 2)
        assert json.loads(asked) == {"import": report["id"], "keys": ["order-0", "order-3"]}
        assert (await conserved(admin))["cancelled"] == 0
        again = json.loads(delayer("import", "jsonl", "run", *words, "--yes", "--again", expect=ExitCode.FOUND).stdout)
        assert (again["parked"], again["superseded"]) == (0, 5)


async def test_a_held_message_keeps_its_key_from_an_imported_one(delayer: Run, database: str, tmp_path: Path) -> None:
    file = tmp_path / "backlog.jsonl"
    file.write_text("\n".join(map(json.dumps, [keyed(4_000_000_000_000, "order", "old"), {"v": 1, "messages": 1}])))
    async with sql(database) as admin:
        delayer("import", "jsonl", "run", str(file), "--unverified", "--yes")
        await admin.execute("UPDATE message SET body = 'waits'")
        await hold(admin)
        run = ("import", "jsonl", "run", str(file), "--unverified", "--yes", "--again")
        told = delayer(*run, expect=ExitCode.FOUND).stderr
        assert "Not imported: 1, because messages or schedules have their keys" in told
        assert await admin.fetchval("SELECT count(*) FROM held WHERE body = 'waits'") == 1


async def test_an_imported_message_that_is_held_can_be_cancelled_by_its_key(
    delayer: Run, database: str, tmp_path: Path
) -> None:
    file = tmp_path / "backlog.jsonl"
    held = {"held": {"kind": "returned", "text": "no queue"}}
    rows = [keyed(4_000_000_000_000, key, "old") | held for key in ("waits", "new", "new")]
    file.write_text("\n".join(map(json.dumps, [*rows, {"v": 1, "messages": 3}])))
    async with opened(database) as place, owned(place) as [lane], sql(database) as admin:
        await place.park(lane, [parcel(place.now_upper_ms() + DAY_MS, b"waits", key=b"waits")], [])
        words = (str(file), "--unverified", "--json")
        run = delayer("import", "jsonl", "run", *words, "--yes", expect=ExitCode.FOUND)
        report = json.loads(run.stdout)
        assert (report["parked"], report["held"], report["superseded"]) == (0, 1, 2)
        assert report["this_time"] == {"parked": 0, "held": 1, "superseded": 2, "already_committed": 0}
        assert report["held_because"] == {"no queue": 1}
        assert await place.park(lane, [], [b"new"]) == {b"new"}
        assert await admin.fetchval("SELECT count(*) FROM held") == 0


DOCUMENT = Path(__file__).parents[2] / "docs" / "importing.md"
DUE_MS = 4_000_000_000_000
# The plugin's storage: one row per message in a table named after the node, plus an index table.
PLANT = """
Content = fun(Headers, Body) ->
    rabbit_basic:build_content({'P_basic', <<"text/plain">>, undefined, Headers, 2, undefined, undefined, undefined,
        <<"60000">>, <<"m-1">>, undefined, undefined, undefined, undefined, undefined}, Body) end,
Message = fun(X, Key, C) ->
    case code:ensure_loaded(mc_amqpl) of
        {module, _} -> {ok, M} = mc_amqpl:message(X, Key, C), M;
        _ -> {ok, M} = rabbit_basic:message(X, Key, C), {delivery, false, false, self(), M, undefined, noflow}
    end end,
Row = fun(N, VHost, Name, Key, Headers, Body) ->
    X = {resource, VHost, exchange, Name},
    Exchange = setelement(2, erlang:make_tuple(13, undefined, [{1, exchange}]), X),
    {delay_entry, {delay_key, 4000000000000 + N, Exchange}, Message(X, Key, Content(Headers, Body)), make_ref()} end,
Plant = fun() ->
    Table = list_to_atom("rabbit_delayed_message" ++ atom_to_list(node())),
    Index = list_to_atom(atom_to_list(Table) ++ "_index"),
    ets:new(Table, [named_table, public, bag, {keypos, 2}]),
    ets:new(Index, [named_table, public, ordered_set]),
    ets:insert(Index, {4000000000000, x}),
    ets:insert(Table, [
        Row(0, <<"VHOST">>, <<"orders.delayed">>, <<"orders.eu">>, [{<<"x-delay">>, signedint, 5000}], <<0,255,10,13>>),
        Row(1, <<"VHOST">>, <<"mail.delayed">>, <<"outbox">>, [{<<"x-delay">>, longstr, <<"7">>},
            {<<"CC">>, array, [{longstr, <<"copy">>}]}, {<<"BCC">>, array, [{longstr, <<"blind">>}]}], <<"mail">>),
        Row(2, <<"VHOST">>, <<"orders.delayed">>, <<"same">>, [], <<>>),
        Row(2, <<"VHOST">>, <<"orders.delayed">>, <<"same">>, [], <<>>),
        Row(3, <<"another">>, <<"orders.delayed">>, <<"k">>, [], <<"x">>)]),
    receive stop -> ok end end,
register(delayer_planted, spawn(Plant)), timer:sleep(500), ok.
"""


def one_liner() -> str:
    """The text between the quotes in the documentation."""
    found = re.search(r"rabbitmqctl eval --silent '(.*?)' > dump.txt", DOCUMENT.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


async def test_the_documented_dump_of_a_real_broker(
    delayer: Run, vhost: str, rabbitmq: RabbitMQ, database: str, tmp_path: Path
) -> None:
    if not rabbitmq.knows_old_messages:
        pytest.skip("RabbitMQ 4.3 cannot run the plugin: a dump is made before the upgrade")
    name = vhost.rpartition("/")[2]
    await asyncio.to_thread(rabbitmq.ctl, "eval", PLANT.replace("VHOST", name))
    try:
        dump = tmp_path / "dump.txt"
        dump.write_text(await asyncio.to_thread(rabbitmq.ctl, "eval", one_liner()))
    finally:
        await asyncio.to_thread(rabbitmq.ctl, "eval", "delayer_planted ! stop, ok.")
    assert dump.read_text().split("\n")[-2] == "5"
    await declare(vhost, Topology((Exchange("orders.delayed", "topic"), Exchange("orders.out", "topic"))))
    route = json.dumps([{"from": "orders.delayed", "to": "orders.out"}])
    renamed = ("--rewrite-destination", "s/^mail.delayed$/mail.out/")
    args = ("import", "delayed-exchange", "run", str(dump), *renamed, "--yes", "--json")
    report = json.loads(delayer(*args, expect=1, DELAYER_ROUTE=route).stdout)
    assert (report["parked"], report["held"]) == (3, 1)
    assert report["left"] == {"of virtual host 'another'": 1}
    async with sql(database) as admin:
        rows = await admin.fetch("SELECT * FROM message ORDER BY due_at, id")
        [held] = await admin.fetch("SELECT * FROM held")
        await conserved(admin)
    assert [(row["due_at"] - DUE_MS, row["exchange"], row["routing_key"], row["body"]) for row in rows] == [
        (0, b"orders.delayed", b"orders.eu", b"\0\xff\n\r"),
        (2, b"orders.delayed", b"same", b""),
        (2, b"orders.delayed", b"same", b""),
    ]
    assert {(row["to_exchange"], row["to_key"]) for row in rows} == {
        (b"orders.out", b"orders.eu"), (b"orders.out", b"same")
    }  # fmt: skip
    bare = Props(content_type=b"text/plain", delivery_mode=2, expiration=b"60000", message_id=b"m-1")
    assert Props.decode(rows[0]["properties"]) == Props(
        **{**bare.__dict__, "headers": ((b"x-delay", number("I", 5000)),)}
    )
    assert (held["to_exchange"], held["to_key"], held["body"]) == (b"mail.out", b"outbox", b"mail")
    headers = dict(Props.decode(held["properties"]).headers or ())
    assert headers[b"x-delay"] == text("7")
    # The broker removed BCC when the message came in; it acts again.
    assert (headers[b"CC"], headers[b"BCC"]) == (array(text("copy")), array(text("blind")))
