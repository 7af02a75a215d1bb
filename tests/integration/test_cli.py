"""The command line against a real broker and a real store."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from urllib.parse import urlsplit

import aio_pika
import pytest
from pamqp.common import FieldTable

from tests.integration.cli import Run, channel_to, destination, rows, said, take
from tests.support.raw import Props
from tests.support.servers import Postgres, RabbitMQ
from tests.support.store import opened, owned, parcel, sql
from tests.support.web import tokens_file

LEVELS = 28


def test_apply_verify_show_remove_in_store_mode(delayer: Run, rabbitmq: RabbitMQ) -> None:
    missing = delayer("topology", "verify", expect=1)
    assert "delayer topology apply" in missing.stderr
    applied = delayer("topology", "apply")
    assert "In place: 2 exchanges, 2 queues, 2 bindings. New exchanges and queues: 4." in applied.stdout
    lack = 'Due messages go to exchanges that do not exist: "delayer.out". Declare them, or add a [[destination]].'
    assert lack in applied.stderr
    assert "New exchanges and queues: 0." in delayer("topology", "apply").stdout
    assert "as it should be" in delayer("topology", "verify").stdout
    found = json.loads(delayer("topology", "verify", "--json").stdout)
    assert found["ok"]
    shown = json.loads(delayer("topology", "show", "--json").stdout)
    assert shown["queues"] == {"delays": 0, "delays.due": None, "delays.refused": 0, "delayer.delay-strays": None}
    table = [line.split() for line in delayer("topology", "show").stdout.splitlines()]
    unused = ["not", "used", "in", "store", "mode"]
    # Below these, RabbitMQ 4.3 and later have a row for the messages they delay.
    assert table[1:6] == [
        ["cascade", *unused], ["delays", "0"], ["delays.due", *unused], ["delays.refused", "0"],
        ["delayer.delay-strays", *unused],
    ]  # fmt: skip
    table = [line.split() for line in delayer("status").stdout.splitlines()]
    assert [line for line in table if line[-1:] == ["mode"]] == [
        ["cascade", *unused],
        ["delays.due", *unused],
        ["delayer.delay-strays", *unused],
    ]
    delayer("topology", "remove", DELAYER_BROKER__MANAGEMENT_URL=rabbitmq.management_url)
    delayer("topology", "verify", expect=1)


def test_the_cascade_belongs_to_native_mode(delayer: Run, rabbitmq: RabbitMQ) -> None:
    delayer("--mode", "native", "topology", "apply")
    delayer("--mode", "native", "topology", "verify")
    shown = delayer("--mode", "native", "topology", "show").stdout
    rows = [line.split() for line in shown.splitlines()]
    assert ["27", "delayer.delay-level-27", "4.25", "years", "0"] in rows
    assert ["0", "delayer.delay-level-00", "1", "s", "0"] in rows
    picture = json.loads(delayer("--mode", "native", "topology", "show", "--json").stdout)
    assert [level["ttl_ms"] for level in picture["levels"]] == [2**level * 1000 for level in reversed(range(LEVELS))]
    told = {"DELAYER_BROKER__MANAGEMENT_URL": rabbitmq.management_url}
    removed = delayer("--mode", "native", "topology", "remove", "--only-cascade", **told)
    assert removed.stdout.startswith("Removed 60; 0 left.")
    delayer("topology", "verify")
    delayer("--mode", "native", "topology", "verify", expect=1)


async def test_a_mismatch_is_named_and_nothing_is_bound(delayer: Run, vhost: str) -> None:
    async with channel_to(vhost) as channel:
        await channel.declare_queue("delays", durable=True)
    refused = delayer("topology", "apply", expect=1)
    assert "'delays'" in refused.stderr
    assert "Nothing was bound" in refused.stderr
    (row,) = [row for row in rows(delayer, "topology", expect=1) if "queue delays:" in row["found"]]
    assert row["advice"].startswith("delete it while it has no consumer and no messages, delayed ones included, or")
    assert "`delayer check` says what to do" in refused.stderr


async def test_no_advice_deletes_a_queue_with_messages(delayer: Run, vhost: str) -> None:
    async with channel_to(vhost) as channel:
        await channel.declare_queue("delays", durable=True)
        await channel.default_exchange.publish(aio_pika.Message(b"", delivery_mode=2), "delays")
    (row,) = [row for row in rows(delayer, "topology", expect=1) if "queue delays:" in row["found"]]
    assert row["found"].endswith("messages in it, which deleting it loses: 1")
    refused = delayer("topology", "apply", expect=1).stderr
    assert "bring them over (docs/operations.md" in row["advice"]
    for advice in (row["advice"], refused.partition("Nothing was bound")[2]):
        assert "elete it" not in advice and "delete_queue" not in advice


async def test_send_publishes_like_any_publisher(delayer: Run, vhost: str) -> None:
    delayer("topology", "apply")
    sent = delayer(
        "send", "--route", "delayer.in", "--routing-key", "orders.new", "--delay", "10s", "--message-id", "one",
        *(word for header in ("who=me", "a:b:str=c:d=e", "c:float=1.5", "d:bool=true", "e:str=", "x:y:int=-3")
          for word in ("--header", header)), "--header", "tries:int=3", "--body-file", "-", stdin=b"\x00\xff body",
    )  # fmt: skip
    assert sent.stdout.startswith('Sent message_id one to exchange "delayer.in"; due ')
    assert sent.stdout.endswith("(in 10 s).\n")
    assert "delayer status" in sent.stderr
    (message,) = await take(vhost, "delays")
    assert (message.exchange, message.routing_key, message.body) == ("delayer.in", "orders.new", b"\x00\xff body")
    typed = {"tries": 3, "who": "me", "a:b": "c:d=e", "c": 1.5, "d": True, "e": "", "x:y": -3}
    assert said(message) == {"x-delay": 10_000} | typed
    assert (message.message_id, message.delivery_mode, message.expiration) == ("one", 2, None)
    assert (message.timestamp, message.content_type) == (None, None)


async def test_send_of_a_cancel_names_its_key(delayer: Run, vhost: str) -> None:
    delayer("topology", "apply")
    sent = delayer("send", "--message-id", "one", "--header", "x-delay-cancel=order 7")
    told = 'Sent message_id one to exchange "delayer.in"; asks to cancel the message under key "order 7".\n'
    assert sent.stdout == told
    assert sent.stderr == "Next: `delayer list --delay-key 'order 7'` shows nothing any more, if it came in time.\n"
    assert len(await take(vhost, "delays")) == 1
    told = delayer(
        "send", "--header", "x-delay-cancel=order 7", expect=2, DELAYER_MODE="native", DELAYER_STORE__URL=None
    ).stderr
    assert "the daemon would refuse it: x-delay-cancel: keys and cancels need a store" in told


async def test_send_straight_to_the_queue(delayer: Run, vhost: str) -> None:
    routes = '[{"from": "", "to": "out"}]'
    delayer("topology", "apply", DELAYER_ROUTE=routes)
    keys = ("--routing-key", "orders.new", "--delay-key", "k")
    delayer("send", "--route", "", *keys, "--at", "2031-01-31T09:00:00.0001+01:00", DELAYER_ROUTE=routes)
    (message,) = await take(vhost, "delays")
    assert (message.exchange, message.routing_key) == ("", "delays")
    assert said(message) == {"x-delay-routing-key": "orders.new", "x-delay-key": "k", "x-deliver-at": 1_927_612_800_001}


async def test_a_message_that_a_queue_refuses_is_reported(delayer: Run, vhost: str) -> None:
    async with channel_to(vhost) as channel:
        full: FieldTable = {"x-max-length": 1, "x-overflow": "reject-publish"}
        await channel.declare_queue("full", durable=True, arguments=full)
        exchange = await channel.declare_exchange("delayer.in", aio_pika.ExchangeType.TOPIC, durable=True)
        await (await channel.get_queue("full")).bind(exchange, "#")
    delayer("send", "--delay", "1s", "--message-id", "1")
    told = delayer("send", "--delay", "1s", "--message-id", "2", expect=1).stderr
    assert 'did not take "2": a queue refused it' in told
    assert [message.message_id for message in await take(vhost, "full")] == ["1"]


async def test_send_does_not_send_what_the_daemon_would_refuse(delayer: Run, vhost: str) -> None:
    delayer("topology", "apply")
    assert "the delay is too long: expected at most 3650 days" in delayer("send", "--delay", "5000d", expect=2).stderr
    assert await take(vhost, "delays") == []


@pytest.mark.parametrize(("number", "command"), [("id:777", "list --message-id"), ("777", "show")])
async def test_send_names_the_command_that_finds_the_message(
    delayer: Run, vhost: str, database: str, number: str, command: str
) -> None:
    """`delayer show` treats a name starting with id: as delayer's own id."""
    delayer("topology", "apply")
    assert f"`delayer {command} {number}` the message" in delayer("send", "--message-id", number).stderr
    async with opened(database) as store, owned(store) as [lane]:
        named = parcel(store.now_upper_ms() + 60_000, b"x", properties=Props(message_id=number.encode()).encode())
        await store.park(lane, [named], [])
    assert number in delayer(*command.split(), number).stdout


async def test_send_refuses_a_misspelt_delay_header_as_the_daemon_does(delayer: Run, vhost: str) -> None:
    delayer("topology", "apply")
    for name in ("x-dealy", "X-Delay"):
        refused = delayer("send", "--header", f"{name}:int=5000", expect=2).stderr
        assert f"delayer: the daemon would refuse it: the message has no delay, but a header '{name}'" in refused
    assert await take(vhost, "delays") == []
    delayer("send", "--header", "x-dealy:int=5000", "--delay", "1s")
    named = '[{"from": "delayer.in", "delay_from": ["header:x-dealy"]}]'
    delayer("send", "--header", "x-dealy:int=5000", DELAYER_ROUTE=named)
    assert len(await take(vhost, "delays")) == 2


@pytest.mark.parametrize("verb", ["status", "check", "send --delay 1s", "topology verify"])
def test_a_refused_login_is_reported_in_whole_sentences(delayer: Run, vhost: str, verb: str) -> None:
    refused = delayer(*verb.split(), expect=3, DELAYER_BROKER__URL=vhost.replace("guest:guest@", "guest:wrong@"))
    assert "efused" in refused.output
    assert ".." not in refused.output


async def test_send_gives_a_timestamp_to_a_route_that_reads_it(delayer: Run, vhost: str) -> None:
    routes = '[{"from": "old", "to": "out", "delay_from": ["timestamp"]}]'
    delayer("topology", "apply", DELAYER_ROUTE=routes)
    delayer("send", "--at", "2031-01-31T08:00:00.5Z", DELAYER_ROUTE=routes)
    (message,) = await take(vhost, "delays")
    assert message.timestamp is not None
    assert message.timestamp.isoformat() == "2031-01-31T08:00:01+00:00"


async def test_messages_without_a_binding_are_not_sent(delayer: Run, vhost: str) -> None:
    nowhere = delayer("send", "--delay", "1s", expect=1)
    assert "no exchange 'delayer.in'" in nowhere.stderr
    assert "delayer topology apply" in nowhere.stderr
    async with channel_to(vhost) as channel:
        await channel.declare_exchange("delayer.in", aio_pika.ExchangeType.TOPIC, durable=True)
    unbound = delayer("send", "--delay", "1s", "--message-id", "lost", expect=1)
    assert 'the broker did not take "lost": nothing is bound for it.' in unbound.stderr


def test_db(delayer: Run, empty_database: str) -> None:
    empty = {"DELAYER_STORE__URL": empty_database}
    before = delayer("db", "current", expect=1, **empty)
    assert "missing" in before.stdout
    assert "delayer db upgrade" in before.stderr
    assert "The schema was missing and is " in delayer("db", "upgrade", **empty).stdout
    assert "nothing to do" in delayer("db", "upgrade", **empty).stdout
    found = json.loads(delayer("db", "current", "--json", **empty).stdout)
    assert found["current"]
    assert found["found"] == found["needed"]


async def test_check_finds_one_thing_after_another(delayer: Run, empty_database: str, vhost: str) -> None:
    def off(expect: int, **more: str) -> dict[str, str]:
        answer = json.loads(delayer("check", "--json", expect=expect, **more).stdout)
        return {row["what"]: row["advice"] for row in answer["checks"] if row["result"] == "off"}

    found = off(1, DELAYER_STORE__URL=empty_database)
    assert found.keys() == {"destination", "schema"}
    assert "db upgrade" in found["schema"]
    assert off(1).keys() == {"destination"}
    await destination(vhost)
    assert off(0) == {}
    table = delayer("check")
    assert "off" not in table.stdout.split()
    assert "schema" in table.stdout


async def test_missing_parts_that_the_daemon_declares_are_notes(delayer: Run, vhost: str) -> None:
    """`delayer --config new.toml check && systemctl reload delayer` must pass when the reload declares new parts."""
    await destination(vhost)
    delayer("topology", "apply")
    routes = '[{"from": "delayer.in", "to": "delayer.out"}, {"from": "mail.in", "to": "delayer.out"}]'
    for more in ({"DELAYER_MODE": "native"}, {"DELAYER_ROUTE": routes}):
        (row,) = [row for row in rows(delayer, "topology", **more) if "missing" in row["found"]]
        assert (row["result"], "the daemon declares it" in row["advice"]) == ("note", True)
        delayer("topology", "verify", expect=1, **more)


async def test_check_counts_messages_that_are_set_aside(delayer: Run, vhost: str, database: str) -> None:
    async with channel_to(vhost) as channel:
        await channel.declare_exchange("delayer.out", aio_pika.ExchangeType.TOPIC, durable=True)
        delayer("--mode", "native", "topology", "apply")
        assert "refused, strays" not in delayer("check").stdout
        for queue, count in (("delays.refused", 2), ("delayer.delay-strays", 1)):
            for _ in range(count):
                await channel.default_exchange.publish(aio_pika.Message(b""), queue)
    async with sql(database) as admin:
        await admin.execute("INSERT INTO counter VALUES (1, 'parked', 3), (1, 'held', 3)")
    aside = {row["found"]: row for row in rows(delayer, "refused, strays", "held")}
    assert aside.keys() == {'2 in "delays.refused"', '1 in "delayer.delay-strays"', "3 in the store"}
    assert all(row["result"] == "note" and row["advice"] for row in aside.values())


def test_a_newer_schema_is_left_alone_and_every_verb_says_so(delayer: Run, postgres: Postgres, database: str) -> None:
    delayer("topology", "apply")
    name = urlsplit(database).path[1:]
    postgres.execute("UPDATE delayer_schema_version SET version_num = '9999'", database=name)
    newer = "use that version of delayer, or a newer one"
    for verb in (("db", "upgrade"), ("db", "current"), ("status",), ("check",), ("check", "--json")):
        told = delayer(*verb, expect=1)
        shown = f"{told.stdout} {told.stderr}"
        assert newer in shown, verb
        assert "db upgrade" not in shown, verb
    status = json.loads(delayer("status", "--json", expect=1).stdout)
    assert (status["store"]["upgrade_pending"], status["store"]["advice"]) == (False, newer)
    current = json.loads(delayer("db", "current", "--json", expect=1).stdout)
    assert (current["found"], current["current"], current["advice"]) == ("9999", False, newer)


def test_each_refusal_of_the_store_has_its_own_advice(delayer: Run, postgres: Postgres, empty_database: str) -> None:
    """The refusals of Postgres to a new user: an unknown role, a missing database, a missing right."""
    delayer("topology", "apply")
    postgres.execute("DROP ROLE IF EXISTS poor")
    postgres.execute("CREATE ROLE poor LOGIN")
    poor = empty_database.replace("postgres@", "poor@")
    for url, verbs, advice in (
        (
            empty_database.replace("postgres@", "nobody@"),
            ("upgrade", "current"),
            "check user and password in store.url",
        ),
        (f"{empty_database}x", ("upgrade", "current"), "createdb -O"),
        (poor, ("upgrade",), "ALTER DATABASE … OWNER TO"),
    ):
        for verb in verbs:
            refused = delayer("db", verb, expect=3, DELAYER_STORE__URL=url)
            assert refused.stderr.startswith("delayer: the store refused: "), refused.stderr
            assert advice in refused.stderr
        if url != poor:
            assert advice in rows(delayer, "store", expect=3, DELAYER_STORE__URL=url)[-1]["advice"]
            assert advice in delayer("status", expect=3, DELAYER_STORE__URL=url).stderr
    name = urlsplit(empty_database).path[1:]
    postgres.execute(f'ALTER DATABASE "{name}" OWNER TO poor')
    delayer("db", "upgrade", DELAYER_STORE__URL=poor)
    postgres.execute("DROP OWNED BY poor", database=name)
    postgres.execute(f'ALTER DATABASE "{name}" OWNER TO postgres')
    postgres.execute("DROP ROLE poor")


def test_a_schema_of_another_application_is_a_mistake_of_the_configuration(
    delayer: Run, postgres: Postgres, empty_database: str
) -> None:
    """Not a store out of reach, which a script would try again."""
    postgres.execute("CREATE TABLE message (n integer)", database=urlsplit(empty_database).path[1:])
    told = delayer("db", "upgrade", expect=2, DELAYER_STORE__URL=empty_database).stderr
    assert told.startswith("delayer: the schema 'public' is in use: relation \"message\" already exists"), told
    assert "Next: give delayer a schema of its own" in told
    path = f"{empty_database}?options=-csearch_path%3Dnowhere"
    assert "CREATE SCHEMA" in delayer("db", "upgrade", expect=2, DELAYER_STORE__URL=path).stderr


def test_status(delayer: Run, empty_database: str) -> None:
    pending = delayer("status", expect=1, DELAYER_STORE__URL=empty_database)
    assert "delayer db upgrade" in pending.stderr
    delayer("topology", "apply")
    for _ in range(3):
        delayer("send", "--delay", "1h")
    told = delayer("status")
    assert re.search(r"^broker: \S+:\d+   virtual host: \S+   database: \w+ on \S+$", told.stdout, re.MULTILINE)
    assert "mode: store" in told.stdout
    assert "waiting: 0   held: 0   next due in the store: –" in told.stdout
    assert ["delays", "3"] in [line.split() for line in told.stdout.splitlines()]
    answer = json.loads(delayer("status", "--json").stdout)
    assert answer["mode"] == "store"
    assert answer["broker"]["queues"]["delays"] == 3
    assert answer["broker"]["queues"]["delays.refused"] == 0
    assert len(answer["broker"]["cascade"]) == LEVELS
    assert (answer["store"]["waiting"], answer["store"]["held"]) == (0, 0)
    lanes = answer["store"]["lanes"]
    assert [lane["lane"] for lane in lanes] == [1, 2, 3, 4]
    for lane in lanes:
        assert (lane["route"], lane["owner"], lane["alive"]) == (None, "", False)
        assert (lane["waiting"], lane["held"], lane["released"]) == (0, 0, 0)
    nothing = {"count": 0, "messages": 0, "broken": 0, "broken_messages": 0, "late": 0, "late_messages": 0}
    assert answer["store"]["segments"] == {**nothing, "next_due_ms": None}
    assert "compacted" not in told.stdout


async def test_status_says_the_next_step(delayer: Run, vhost: str, database: str) -> None:
    native = {"DELAYER_MODE": "native", "DELAYER_STORE__URL": None}
    nothing = delayer("status", **native)
    assert "Missing on the broker: delays, delays.due, delays.refused, delayer.delay-strays. Next: " in nothing.stderr
    assert "not listed" in nothing.stdout
    assert "Missing on the broker: delays, delays.refused. Next: " in delayer("status").stderr
    delayer("topology", "apply", **native)
    assert "Next" not in delayer("status", **native).stderr
    async with channel_to(vhost) as channel:
        for queue in ("delays.refused", "delayer.delay-strays"):
            await channel.default_exchange.publish(aio_pika.Message(b""), queue)
    async with sql(database) as admin:
        await admin.execute("INSERT INTO counter VALUES (1, 'parked', 3), (1, 'held', 3)")
    told = delayer("status").stderr
    assert all(f"Next: `delayer {verb} list`" in told for verb in ("refused", "strays", "held"))


async def test_segments_are_counted_and_a_broken_segment_fails_the_check(delayer: Run, database: str) -> None:
    delayer("topology", "apply")
    async with sql(database) as connection:
        await connection.execute(
            "INSERT INTO segment (lane, first_due, last_due, ids, messages, raw_bytes, format, digest, packed)"
            " SELECT 1, now() + n * interval '30 hours', now() + interval '40 days', '{1,9}', 7, 1, 1, '', ''"
            " FROM generate_series(1, 2) AS n"
        )
        told = delayer("status").stdout
        assert "compacted: 14 in 2 segments   next due: 2" in told
        assert "(in 1 d 5 h)" in told
        assert "BROKEN" not in told
        with pytest.MonkeyPatch.context() as without:
            without.setitem(sys.modules, "pyarrow", None)
            for verb, code in ("check", 1), ("list", 3):
                assert "install delayer[segments]" in delayer(verb, expect=code, COLUMNS="400").output
        await connection.execute("UPDATE segment SET first_due = now() + interval '10 minutes' WHERE id = 2")
        assert "LATE: 1 segment with 7 messages should be restored by now" in delayer("status").stdout
        found = json.loads(delayer("status", "--json").stdout)["store"]["segments"]
        assert (found["late"], found["late_messages"]) == (1, 7)
        [row] = rows(delayer, "segments", expect=1)
        assert row["found"] == "1 with 7 messages should be restored by now"
        await connection.execute("UPDATE segment SET first_due = now() + interval '30 hours' WHERE id = 2")
        await connection.execute("UPDATE segment SET broken_at = now(), broken = 'why' WHERE id = 1")
    assert "BROKEN: 1 segment with 7 messages, unreadable" in delayer("status").stdout
    found = json.loads(delayer("status", "--json").stdout)["store"]["segments"]
    assert (found["count"], found["messages"], found["broken"], found["broken_messages"]) == (2, 14, 1, 7)
    [row] = rows(delayer, "segments", expect=1)
    assert (row["result"], row["found"]) == ("off", "1 unreadable, with 7 messages")


def test_status_works_with_one_server_out_of_reach(delayer: Run) -> None:
    delayer("topology", "apply")
    half = delayer("status", "--json", expect=3, DELAYER_STORE__URL="postgresql://u:hunter2@127.0.0.1:1/d")
    answer = json.loads(half.stdout)
    assert answer["broker"]["queues"]["delays"] == 0
    assert answer["store"]["error"].startswith("connect: Connect call failed ('127.0.0.1', 1)")
    assert "hunter2" not in half.stdout + half.stderr
    half = delayer("status", expect=3, DELAYER_BROKER__URL="amqp://u:hunter2@127.0.0.1:1")
    assert "waiting: 0" in half.stdout
    assert re.search(r"^lane +of route +owner +waiting +held +released +next due$", half.stdout, re.MULTILINE)
    assert "The broker is out of reach" in half.stderr
    assert "Next: check broker.url" in half.stderr
    assert "hunter2" not in half.stdout + half.stderr


# delayer check: whether daemons are at work.


async def test_an_intake_queue_without_a_consumer_is_reported(delayer: Run, vhost: str) -> None:
    async with channel_to(vhost) as channel:
        await channel.declare_exchange("delayer.out", aio_pika.ExchangeType.TOPIC, durable=True)
        assert rows(delayer, "intake") == [], "the queue is not there yet"
        delayer("topology", "apply")
        (row,) = rows(delayer, "intake")
        assert (row["result"], row["found"]) == ("note", 'no consumer reads "delays"; 0 wait in it')
        await channel.default_exchange.publish(aio_pika.Message(b""), "delays")
        (row,) = rows(delayer, "intake", expect=1)
        assert (row["result"], row["found"]) == ("off", 'no consumer reads "delays"; 1 wait in it')

        async def keep(_message: object) -> None:
            """Keep the message without an acknowledgement."""

        await (await channel.get_queue("delays")).consume(keep)
        assert rows(delayer, "intake") == []


async def test_overdue_messages_of_a_lane_without_owner_are_off(delayer: Run, vhost: str, database: str) -> None:
    """All daemons are gone, so an exit code of 0 would be wrong."""
    await destination(vhost)
    async with opened(database) as store, owned(store) as [lane]:
        await store.park(lane, [parcel(store.now_upper_ms() - 90_000, b"overdue")], [])
        (row,) = rows(delayer, "lanes")
        assert row["result"] == "ok", "its owner is about to release it"
        assert row["found"].startswith("1 owned by ")
    (row,) = rows(delayer, "lanes", expect=1)
    assert row["result"] == "off"
    assert row["found"].startswith("messages are overdue by 9")
    assert row["found"].endswith("in lane 1 that no daemon owns")


def test_a_destination_that_the_daemon_declares_is_not_off(delayer: Run, tmp_path: Path) -> None:
    """The absence of an exchange that the daemon declares at its start is a note; that of any other is off."""
    file = tmp_path / "delayer.toml"
    file.write_text("""
[[route]]
from = "orders"
to = "orders.due"
[[destination]]
exchange = "orders.due"
queue = "orders.eu"
""")
    options = ("--config", str(file))
    assert rows(delayer, "destination", options=options) == []
    seen = rows(delayer, "topology", options=options)
    assert any("orders.due" in row["found"] for row in seen if row["result"] == "note")
    file.write_text(file.read_text().replace('exchange = "orders.due"', 'exchange = "other"'))
    assert [row["result"] for row in rows(delayer, "destination", expect=1, options=options)] == ["off"]


def test_a_route_that_makes_messages_late_and_then_holds_them_is_reported(delayer: Run) -> None:
    both = {"max_rate": 100, "late_limit": "3s", "late_action": "hold"}
    routes = [{"from": "both", **both}, {"from": "paced", "max_rate": 100}, {"from": "late", **both, "max_rate": 0}]
    told = {"DELAYER_ROUTE": json.dumps(routes)}
    seen = json.loads(delayer("check", "--offline", "--json", **told).stdout)["checks"]
    [row] = [one for one in seen if one["what"] == "routes"]
    assert row["result"] == "note"
    assert row["found"].startswith('"both" holds messages that wait longer than late_limit (3s)')


def test_an_address_that_others_can_reach_is_reported(delayer: Run) -> None:
    away, tokens = "0.0.0.0:9419", tokens_file("t" * 16)
    for listen, more, told in (
        ("127.0.0.1:9419", {}, []), ("[::1]:9419", {}, []), ("", {}, []), (away, {}, ["without a token, so"]),
        (away, {"DELAYER_HTTP__TOKENS_FILE": tokens}, []),
        (away, {"DELAYER_HTTP__OPEN": "true"}, ["anyone who can reach"]),
    ):  # fmt: skip
        seen = json.loads(delayer("check", "--offline", "--json", DELAYER_HTTP__LISTEN=listen, **more).stdout)["checks"]
        found = [row["found"] for row in seen if row["what"] == "http"]
        assert len(found) == len(told) and all(text in one for text, one in zip(told, found, strict=True))
