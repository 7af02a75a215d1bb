"""Starting and stopping, servers that start late or go away for a while, and what the daemon reports during that."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import select
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.acceptance.conftest import Notices
from tests.acceptance.own_vhost import OwnVhost, delayed
from tests.acceptance.world import Things, assert_no_secret, secret_store_url
from tests.support.daemon import EXECUTABLE, DaemonProcess, answered, command
from tests.support.place import eventually
from tests.support.proxy import Proxy
from tests.support.raw import Message, Props, Raw, text
from tests.support.servers import Postgres, RabbitMQ
from tests.support.web import Web

STOP_SECONDS = 10.0
MANY = 2000


@pytest.mark.parametrize(
    ("change", "reason", "next_step"),
    [
        ("DROP TABLE delayer_schema_version", "delayer db upgrade", "run `delayer db upgrade`"),
        (
            "UPDATE delayer_schema_version SET version_num = '9999'",
            "a newer delayer",
            "use that version of delayer, or a newer one",
        ),
    ],
    ids=["missing", "newer"],
)
async def test_a_store_with_another_schema_is_an_error_with_a_next_step(
    place: OwnVhost, postgres: Postgres, schema: str, store: str, change: str, reason: str, next_step: str
) -> None:
    postgres.execute(change, database=schema)
    async with DaemonProcess(place.environ("store", store)) as daemon:
        assert await daemon.wait() == 1
        event = await daemon.event("start refused")
        assert reason in event["reason"]
        assert event["next_step"] == next_step
        assert "consuming interrupted" not in [each["event"] for each in daemon.events]
        assert not daemon.stray_lines
        assert_no_secret(daemon)


@pytest.mark.parametrize("server", ["broker", "store"])
async def test_a_refused_login_is_one_error_with_the_next_step(
    place: OwnVhost, postgres: Postgres, schema: str, server: str
) -> None:
    urls = {"broker": place.rabbitmq.url(place.vhost), "store": postgres.url(schema)}
    urls[server] = re.sub("//[^@]*@", "//nobody:Sesame@", urls[server])
    environ = place.environ("store", urls["store"]) | {"BROKER__URL": urls["broker"]}
    async with DaemonProcess(environ) as daemon:
        event = await daemon.event(f"{server} refused")
        assert (event["level"], "nobody" in event["reason"] or server == "broker") == ("error", True)
        assert event["next_step"].startswith("check user")
        await daemon.event("consuming interrupted")  # By now every connection has tried.
        assert await daemon.stop() == 0
        assert [one["event"] for one in daemon.events if one["level"] == "error"] == [f"{server} refused"]


@pytest.mark.parametrize("mode", ["store", "native"])
async def test_a_queue_of_another_kind_is_an_error_that_names_it(
    place: OwnVhost, postgres: Postgres, schema: str, mode: str
) -> None:
    place.things.queue("delays")
    store = secret_store_url(postgres, schema) if mode == "store" else ""
    async with DaemonProcess(place.environ(mode, store)) as daemon:
        assert await daemon.wait() == 1
        event = await daemon.event("start refused")
        assert "delays" in event["reason"]
        assert "x-queue-type" in event["reason"]
        assert not daemon.stray_lines
        assert_no_secret(daemon)


@pytest.mark.parametrize("mode", ["store", "native"])
@pytest.mark.parametrize("order", [signal.SIGTERM, signal.SIGINT])
async def test_stopping_with_messages_in_flight(
    place: OwnVhost, postgres: Postgres, schema: str, mode: str, order: signal.Signals
) -> None:
    """The daemon stops in time, with exit code 0. A stop is not a fault: nothing is lost, and nothing is delivered
    twice."""
    environ = place.environ(mode, secret_store_url(postgres, schema) if mode == "store" else "")
    messages = [delayed(f"in flight {n}", n % 3 * 500) for n in range(MANY)]
    async with await place.raw() as raw:
        inbox = await raw.inbox("inbox")
        async with DaemonProcess(environ) as daemon:
            await daemon.ready()
            publishing = asyncio.create_task(raw.publish(*messages))
            assert await inbox.until(lambda: bool(inbox.arrivals))
            began = time.monotonic()
            daemon.signal(order)
            assert await daemon.wait() == 0
            assert time.monotonic() - began < STOP_SECONDS
            assert not [event for event in daemon.events if event["level"] == "error"], daemon.tail()
            assert_no_secret(daemon)
            await publishing
        async with DaemonProcess(environ) as second:
            await second.ready()
            await inbox.got(message.body for message in messages)
            assert await second.stop() == 0
        await raw.round_trip()
        assert set(inbox.counts.values()) == {1}
        assert all(arrival.at_ms >= arrival.due_ms for arrival in inbox.arrivals)


@pytest.mark.parametrize("mode", ["store", "native"])
async def test_stopping_while_nothing_is_reached(mode: str) -> None:
    """Without any server the daemon keeps reporting that, and still stops."""
    environ = {"MODE": mode, "BROKER__URL": "amqp://u:Sesame.Broker%2F1@127.0.0.1:1/"}
    if mode == "store":
        environ["STORE__URL"] = "postgresql://u:Sesame.Store%2F2@127.0.0.1:1/x"
    async with DaemonProcess(environ) as daemon:
        await daemon.event("broker unreachable")
        await daemon.event("consuming interrupted")
        if mode == "store":
            await daemon.event("store unreachable")
        assert await daemon.stop() == 0
        assert not daemon.stray_lines
        assert_no_secret(daemon)


async def test_repeated_stop_signals_do_not_change_the_exit_code() -> None:
    """Even if signals arrive while the interpreter exits."""
    async with DaemonProcess({"MODE": "native", "BROKER__URL": "amqp://127.0.0.1:1/"}) as daemon:
        await daemon.event("broker unreachable")
        assert await daemon.stop_insisting() == 0


async def test_a_spare_process_is_ready_and_says_that_it_has_no_lane(
    place: OwnVhost, postgres: Postgres, schema: str, notices: Notices
) -> None:
    """systemd would kill a process that never reports READY; this one waits for another process to exit."""
    postgres.execute("DELETE FROM lane WHERE number > 1", database=schema)
    environ = place.environ("store", postgres.url(schema))
    async with DaemonProcess(environ) as first:
        await first.ready()
        await eventually(lambda: notices.said("READY=1"))
        async with DaemonProcess(environ) as spare:
            await eventually(lambda: notices.said("READY=1", "no lane for this process"))
            assert "ready" not in [event["event"] for event in spare.events], "it consumes nothing yet"
            assert await first.stop() == 0
            await spare.ready()
            await eventually(lambda: notices.said("STATUS=mode store"))
            assert await spare.stop() == 0


@pytest.fixture
def servers() -> Iterator[tuple[RabbitMQ, Postgres]]:
    """Servers of the test's own, not started."""
    with ExitStack() as undo:
        rabbitmq, postgres = RabbitMQ(), Postgres()
        undo.callback(rabbitmq.close)
        undo.callback(postgres.close)
        yield rabbitmq, postgres


@pytest.mark.deadline(180)
async def test_the_daemon_outlasts_late_and_lost_servers(servers: tuple[RabbitMQ, Postgres]) -> None:
    """The daemon starts before both, works once both are up, and resumes after an outage of either.

    Messages in flight may then be delivered twice; none may be missing or early.
    """
    rabbitmq, postgres = servers
    in_thread = asyncio.to_thread
    await in_thread(postgres.start)
    schema = await in_thread(postgres.add_store)
    await in_thread(postgres.stop)
    url = rabbitmq.url("/", user="delayer:Sesame.Broker%2F1")
    environ = OwnVhost(rabbitmq, "/", Things(rabbitmq, "/"), url).environ("store", secret_store_url(postgres, schema))
    sent: list[bytes] = []

    async def send(raw: Raw, name: str) -> None:
        messages = [delayed(f"{name} {n}", n * 50) for n in range(100)]
        await raw.publish(*messages)
        sent.extend(message.body for message in messages)

    async with DaemonProcess(environ) as daemon:
        await daemon.event("broker unreachable")
        await daemon.event("store unreachable")
        await in_thread(rabbitmq.start)
        # The daemon's user is created last: the daemon retries even after a rejected password.
        OwnVhost.furnished(rabbitmq, "/")
        await daemon.event("broker connected", timeout=60)
        assert not [event for event in daemon.events if event["event"] == "ready"]
        await in_thread(postgres.start)
        await daemon.event("ready", timeout=60)

        async with await Raw.connect(rabbitmq.url("/")) as raw:
            inbox = await raw.inbox("inbox")
            await send(raw, "before the database leaves")
            assert await inbox.until(lambda: len(inbox.arrivals) > 10)
            seen = len(daemon.events)
            await in_thread(postgres.restart)
            await send(raw, "after the database came back")
            await daemon.event("lane taken", after=seen, timeout=60)
            await inbox.got(sent, timeout=60)
            early = [one for one in inbox.arrivals if one.at_ms < one.due_ms]

            await send(raw, "before the broker leaves")
            assert await inbox.until(lambda: len(inbox.counts) > len(sent) - 90)
            seen = len(daemon.events)
            await in_thread(rabbitmq.restart)
            before = set(inbox.counts)
        async with await Raw.connect(rabbitmq.url("/")) as raw:
            await daemon.event("consuming", after=seen, timeout=60)
            inbox = await raw.inbox("inbox")
            await send(raw, "after the broker came back")
            await inbox.got(set(sent) - before, timeout=60)
            early += [one for one in inbox.arrivals if one.at_ms < one.due_ms]
        assert not early
        assert await daemon.stop() == 0
        assert not daemon.stray_lines
        assert_no_secret(daemon)
        assert {one["event"] for one in daemon.events if one["level"] in ("error", "critical")} <= {"broker refused"}


def close_connections(place: OwnVhost) -> list[str]:
    """Close the daemon's connections that the management API knows; it learns of new ones a little later."""
    found = [
        one["name"]
        for one in place.rabbitmq.api("GET", f"/api/vhosts/{place.vhost}/connections")
        if one.get("user") == "delayer"
    ]
    for name in found:
        place.rabbitmq.api("DELETE", f"/api/connections/{quote(name, safe='')}")
    return found


async def test_a_changed_topology_does_not_stop_a_running_daemon(
    place: OwnVhost, postgres: Postgres, schema: str
) -> None:
    """An operator replaced a queue with one of another kind, and the connections are lost. Parked messages are
    released, and consuming resumes once the queue is right again."""
    theirs = [{"exchange": "theirs", "type": "topic", "queue": "theirs"}]
    environ = place.environ("store", secret_store_url(postgres, schema)) | {"DESTINATION": json.dumps(theirs)}
    async with place.working(environ) as (daemon, raw, inbox):
        await raw.publish(delayed("parked", 4000), delayed("parked with it", 100))
        await inbox.got([b"parked with it"])
        place.rabbitmq.api("DELETE", f"/api/queues/{place.vhost}/theirs")
        place.things.queue("theirs", "classic")

        def cut() -> bool:
            close_connections(place)
            return any("queue 'theirs'" in event.get("reason", "") for event in daemon.events)

        await eventually(cut)
        await daemon.event("consuming interrupted", where=lambda event: "queue 'theirs'" in event["reason"])
        await inbox.got([b"parked"])
        seen = len(daemon.events)
        place.rabbitmq.api("DELETE", f"/api/queues/{place.vhost}/theirs")
        await daemon.event("consuming", after=seen)
        assert await daemon.stop() == 0
        assert_no_secret(daemon)


@pytest.mark.deadline(120)
async def test_a_hung_server_does_not_delay_the_stop(servers: tuple[RabbitMQ, Postgres]) -> None:
    """The daemon stops in time with exit code 0 while broker or database do not answer."""
    rabbitmq, postgres = servers
    await asyncio.gather(asyncio.to_thread(rabbitmq.start), asyncio.to_thread(postgres.start))
    schema = await asyncio.to_thread(postgres.add_store)
    place = OwnVhost.furnished(rabbitmq, "/")
    environ = place.environ("store", postgres.url(schema)) | {"BROKER__URL": rabbitmq.url("/")}
    for hanging in (rabbitmq, postgres):
        async with DaemonProcess(environ) as daemon:
            await daemon.ready()
            async with await Raw.connect(rabbitmq.url("/")) as raw:
                await raw.publish(*(delayed(f"in flight {n}", n % 3 * 400) for n in range(300)))
            hanging.pause()
            try:
                began = time.monotonic()
                assert await daemon.stop() == 0
                assert time.monotonic() - began < STOP_SECONDS
            finally:
                hanging.resume()


@pytest.mark.words
async def test_a_key_without_a_store_does_not_stop_other_messages_in_native_mode(place: OwnVhost) -> None:
    """The configured store is unreachable, so messages that need it are refused for that reason; the rest flow."""
    environ = place.environ("native", "postgresql://nobody@127.0.0.1:1/nowhere")
    keyed = delayed("with a key", 100, under="k")
    async with place.working(environ) as (daemon, raw, inbox):
        good = [delayed(f"good {n}", 0) for n in range(50)]
        await raw.publish(*good[:25], keyed, *good[25:])
        await inbox.got([message.body for message in good])
        refused = await daemon.event("message refused")
        assert "the store" in refused["reason"]
        assert not [event for event in daemon.events if event["event"] == "consuming interrupted"]


async def test_keys_that_wait_at_the_start_reach_the_store_in_native_mode(
    place: OwnVhost, postgres: Postgres, schema: str
) -> None:
    """With a slow store the intake is ready long before the lanes."""
    keyed = [delayed(f"key {n}", 100, under=f"key {n}") for n in range(50)]
    async with Proxy(postgres.port) as proxy, await place.raw() as raw:
        proxy.slow(delay=0.01)
        environ = place.environ("native", postgres.url(schema, port=proxy.port))
        async with DaemonProcess(environ) as daemon:
            await daemon.ready()
            assert await daemon.stop() == 0
        await raw.publish(*keyed)
        async with DaemonProcess(environ) as daemon:
            inbox = await raw.inbox("inbox")
            await inbox.got([message.body for message in keyed])
            assert not [event for event in daemon.events if event["event"] == "message refused"]
            assert await daemon.stop() == 0


REFUSED = 400
"""Number of messages. Each has its own log line; together the lines are three times the size of a pipe."""


async def bound(place: OwnVhost) -> bool:
    bindings = await asyncio.to_thread(place.rabbitmq.api, "GET", f"/api/bindings/{quote(place.vhost, safe='')}")
    return any(one["source"] == "in" for one in bindings)


async def test_an_unread_log_does_not_stop_messages(place: OwnVhost) -> None:
    outlet, inlet = os.pipe()
    fcntl.fcntl(inlet, fcntl.F_SETPIPE_SZ, 4096)  # A flood logs few lines.
    environ = {"HTTP__LISTEN": "", "LOG__FORMAT": "json"} | place.environ("native")
    daemon = await asyncio.create_subprocess_exec(
        str(EXECUTABLE), "run", stdin=asyncio.subprocess.DEVNULL, stderr=inlet,
        env=os.environ | {f"DELAYER_{name}": value for name, value in environ.items()},
    )  # fmt: skip
    try:
        await eventually(lambda: bound(place))
        async with await place.raw() as raw:
            inbox = await raw.inbox("inbox")
            wrong = Props(headers=((b"x-delay", text(b"some day " * 40)),), delivery_mode=2)
            await raw.publish(*(Message("in", b"inbox", wrong, b"bad") for _ in range(REFUSED)))
            await eventually(lambda: not select.select([], [inlet], [], 0)[1])
            await raw.publish(delayed("soon", 1_000))
            await inbox.got([b"soon"])
        began = time.monotonic()
        daemon.terminate()
        assert await asyncio.wait_for(daemon.wait(), 15) == 0
        assert time.monotonic() - began < 10
        assert os.read(outlet, 5) == b'{"tim'
    finally:
        if daemon.returncode is None:
            daemon.kill()
            await daemon.wait()
        os.close(outlet)
        os.close(inlet)


async def test_status_shows_rates_and_lateness_and_refreshes(place: OwnVhost, store: str, tmp_path: Path) -> None:
    config = tmp_path / "delayer.toml"
    environ = place.environ("store", store) | {"HTTP__LISTEN": "127.0.0.1:0"}
    async with place.working(environ) as (daemon, raw, inbox):
        web = await Web.of(daemon)
        place.write(config, "store", {"store": {"url": store}, "http": {"listen": web.address}})
        messages = [delayed(f"soon {n}", n) for n in range(200)]
        await raw.publish(*messages, delayed("later", 3_600_000))
        await inbox.got(message.body for message in messages)
        found = await eventually(
            lambda: answered(config, "status"),
            lambda seen: min(seen["live"]["last"]["60"]["rates"][kind] for kind in ("parked", "released")) > 0,
        )
        last = found["live"]["last"]["60"]
        assert found["live"]["error"] is None
        assert 0 <= last["p50"] <= last["p99"] <= last["worst"] < 60
        text = await command(config, "status")
        assert re.search(r"1 min +\d+\.\d +\d+\.\d +\d+ ms", text), text

        process = await asyncio.create_subprocess_exec(
            str(EXECUTABLE), "--config", str(config), "status", "--watch", "--json",
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        looks = [json.loads(await process.stdout.readline()) for _ in range(3)]
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 0
        assert [look["store"]["waiting"] for look in looks] == [1, 1, 1]
        assert await daemon.stop() == 0
    assert "no daemon answers" in await command(config, "status")


@pytest.mark.slow
@pytest.mark.deadline(150)
async def test_a_message_after_an_idle_minute_is_on_time(rabbitmq: RabbitMQ, store: str) -> None:
    async def idle(mode: str) -> None:
        vhost = rabbitmq.add_vhost()
        place = OwnVhost.furnished(rabbitmq, vhost)
        async with place.working(place.environ(mode, store if mode == "store" else "")) as (daemon, raw, inbox):
            sent_ms = time.time() * 1000
            await raw.publish(delayed("soon", 2_000), delayed("far", 68_000))
            assert await inbox.until(lambda: len(inbox.arrivals) == 2, timeout=90)
            assert [arrival.delivery.body for arrival in inbox.arrivals] == [b"soon", b"far"]
            assert 68_000 <= inbox.arrivals[1].at_ms - sent_ms < 71_000
            assert await daemon.stop() == 0
        rabbitmq.drop_vhost(vhost)

    async with asyncio.TaskGroup() as both:  # They wait together.
        both.create_task(idle("store"))
        both.create_task(idle("native"))
