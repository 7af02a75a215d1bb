"""Passwords and certificates that change under a running daemon, addresses that are dead, and servers that are away
during a reload. The daemon is ready again by itself."""

from __future__ import annotations

import asyncio
import shutil
import signal
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.acceptance.own_vhost import OwnVhost, delayed
from tests.acceptance.test_tls_and_secrets import run
from tests.acceptance.world import USER
from tests.integration.cli import Run, rows
from tests.support import ports
from tests.support.daemon import DaemonProcess
from tests.support.place import eventually
from tests.support.proxy import Proxy
from tests.support.raw import Inbox, Raw
from tests.support.servers import Certificates, Postgres, RabbitMQ
from tests.support.tls import RIGHT, Papers

ROLE = "rotating"


def end_connections(rabbitmq: RabbitMQ, vhost: str) -> None:
    for one in rabbitmq.api("GET", f"/api/vhosts/{quote(vhost, safe='')}/connections"):
        if one["user"] == USER:
            rabbitmq.api("DELETE", f"/api/connections/{quote(one['name'], safe='')}")


def end_sessions(postgres: Postgres, database: str) -> None:
    postgres.execute(
        f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{database}'"
        " AND application_name LIKE 'delayer %'"
    )


async def works(raw: Raw, inbox: Inbox, body: str) -> None:
    await raw.publish(delayed(body, 300))
    await inbox.got([body.encode()])


@pytest.fixture(autouse=True)
def _nothing_missing(place: OwnVhost) -> None:
    """A route of the place publishes to this exchange."""
    place.things.exchange("missing")


@pytest.fixture
def asking(postgres: Postgres, schema: str) -> str:
    """A database whose owner ROLE needs the password "one"."""
    hba = postgres.data / "pg_hba.conf"
    line = f"host all {ROLE} 127.0.0.1/32 scram-sha-256\n"
    if line not in hba.read_text():
        hba.write_text(line + hba.read_text())
        postgres.execute(f"CREATE ROLE {ROLE} LOGIN SUPERUSER")
        postgres.execute("SELECT pg_reload_conf()")
    postgres.execute(f"ALTER ROLE {ROLE} PASSWORD 'one'")
    return schema


@pytest.mark.deadline(120)
async def test_passwords_change_on_the_servers_and_in_the_files(
    place: OwnVhost, postgres: Postgres, asking: str, tmp_path: Path
) -> None:
    """All sessions are terminated. The daemon first fails with the old passwords, and picks up the new ones without a
    reload."""
    broker, store, config = tmp_path / "broker", tmp_path / "store", tmp_path / "delayer.toml"

    def write_files(password: str) -> None:
        broker.write_text(place.rabbitmq.url(place.vhost, user=f"{USER}:{password}") + "\n")
        store.write_text(postgres.url(asking, user=f"{ROLE}:{password}") + "\n")

    def change(password: str) -> None:
        place.rabbitmq.api("PUT", f"/api/users/{USER}", {"password": password, "tags": ""})
        postgres.execute(f"ALTER ROLE {ROLE} PASSWORD '{password}'")

    def end_all() -> None:
        end_connections(place.rabbitmq, place.vhost)
        end_sessions(postgres, asking)

    change("one")
    write_files("one")
    place.url = ""
    place.write(config, "store", {"broker": {"url_file": str(broker)}, "store": {"url_file": str(store)}})
    async with place.working(config=config) as (daemon, raw, inbox):
        await works(raw, inbox, "before")
        # The broker lists connections some seconds late.
        await eventually(lambda: len(place.rabbitmq.api("GET", f"/api/vhosts/{place.vhost}/connections")) >= 4)
        change("two")
        seen = len(daemon.events)
        end_all()
        await daemon.event("broker refused", after=seen)
        await daemon.event("store refused", after=seen)
        code, said = await run("--config", str(config), "check")
        assert code == 3, said
        write_files("two")
        await daemon.event("consuming", after=seen)
        await works(raw, inbox, "with new passwords")
        code, said = await run("--config", str(config), "check")
        assert code == 0, said

        # Files missing for a moment change nothing.
        broker.unlink()
        store.unlink()
        await eventually(lambda: len(place.rabbitmq.api("GET", f"/api/vhosts/{place.vhost}/connections")) >= 4)
        seen = len(daemon.events)
        end_all()
        await daemon.event("consuming", after=seen)
        await works(raw, inbox, "without files")
        write_files("two")
        daemon.reload()
        assert "out_of_reach" not in await daemon.event("reloaded", after=seen)
        assert await daemon.stop() == 0
        assert not [event for event in daemon.events if event["event"] == "restart needed"]


@pytest.mark.deadline(240)
async def test_every_certificate_changes_under_its_name(tmp_path: Path) -> None:
    """A new authority, server certificate and client certificate, in the same files."""
    for name in ("old", "new", "now", "server"):
        (tmp_path / name).mkdir()
    old, new = (Papers.issue(tmp_path / name) for name in ("old", "new"))
    ours, theirs = tmp_path / "now", tmp_path / "server"

    def put(papers: Papers, where: Path, name: str) -> None:
        shutil.copyfile(papers.ca, where / "ca.pem")
        shutil.copyfile(papers[name].certificate, where / "one.pem")
        shutil.copyfile(papers[name].key, where / "one.key")

    put(old, ours, "client")
    put(old, theirs, RIGHT)
    shown = Certificates(theirs / "ca.pem", theirs / "one.pem", theirs / "one.key", verify_client=True)
    with RabbitMQ(tls=shown) as rabbitmq, Postgres(tls=old[RIGHT]) as postgres:
        place = OwnVhost.furnished(rabbitmq, rabbitmq.add_vhost())
        place.things.exchange("missing")
        url = rabbitmq.tls_url(place.vhost)
        files = {"ca_file": "ca.pem", "cert_file": "one.pem", "key_file": "one.key"}
        broker = {"url": url} | {key: str(ours / name) for key, name in files.items()}
        database = postgres.add_store()
        store = {"url": postgres.tls_url(database, ours / "ca.pem")}
        config = tmp_path / "delayer.toml"
        place.write(config, "store", {"broker": broker, "store": store})
        async with DaemonProcess({}, config=config) as daemon:
            await daemon.ready()
            seen = len(daemon.events)
            put(new, theirs, RIGHT)
            rabbitmq.stop()
            postgres._secured(*new[RIGHT])
            postgres.execute("SELECT pg_reload_conf()")
            end_sessions(postgres, database)
            await daemon.event("store refused", after=seen)
            rabbitmq.start()
            await daemon.event("broker refused", after=seen)
            # Half of the files: the certificate does not belong to the key.
            shutil.copyfile(new["client"].certificate, ours / "one.pem")
            await daemon.event("broker refused", after=seen, where=lambda one: "keyfile" in one["reason"])
            put(new, ours, "client")
            await daemon.event("consuming", after=seen)
            async with await place.raw() as raw:
                inbox = await raw.inbox("inbox")
                await works(raw, inbox, "with new certificates")
            code, said = await run("--config", str(config), "check")
            assert code == 0, said
            assert await daemon.stop() == 0


async def test_a_dead_address_is_passed_over(place: OwnVhost, store: str, tmp_path: Path) -> None:
    """Daemon and commands use the list, and the daemon moves on when an address dies."""
    config = tmp_path / "delayer.toml"
    urls = [place.url.replace(f":{place.rabbitmq.port}/", f":{ports.reserve()}/")]
    async with Proxy(place.rabbitmq.port) as first, Proxy(place.rabbitmq.port) as second:
        urls += [place.url.replace(f":{place.rabbitmq.port}/", f":{one.port}/") for one in (first, second)]
        place.write(config, "store", {"broker": {"url": urls}, "store": {"url": store}})
        async with place.working(config=config) as (daemon, raw, inbox):
            await works(raw, inbox, "first")
            for _ in range(4):
                code, said = await run("--config", str(config), "check")
                assert code == 0, said
                code, said = await run("--config", str(config), "topology", "verify")
                assert code == 0, said
            for dead, other in ((first, second), (second, first)):
                await other.accept()
                seen = len(daemon.events)
                await dead.refuse()
                code, said = await run("--config", str(config), "check")
                assert code == 0, said
                await works(raw, inbox, f"without {dead.port}")
                assert not [one for one in daemon.events[seen:] if one["event"] == "broker unreachable"]
            environ = {"BROKER__URL": ",".join(urls), "STORE__URL": store, "HTTP__LISTEN": "127.0.0.1:0"}
            assert await daemon.stop() == 0
            async with DaemonProcess(environ) as another:
                await another.ready()
                assert await another.stop() == 0


@pytest.mark.parametrize("away", ["broker", "store"])
async def test_a_reload_is_adopted_while_a_server_is_away(
    place: OwnVhost, postgres: Postgres, schema: str, tmp_path: Path, away: str
) -> None:
    config = tmp_path / "delayer.toml"
    async with Proxy(place.rabbitmq.port) as broker, Proxy(postgres.port) as store:
        place.url = place.url.replace(f":{place.rabbitmq.port}/", f":{broker.port}/")
        tables = {"store": {"url": postgres.url(schema, port=store.port)}}
        place.write(config, "store", tables)
        async with place.working(config=config) as (daemon, raw, inbox):
            await works(raw, inbox, "before")
            server = broker if away == "broker" else store
            seen = len(daemon.events)
            await server.refuse()
            await daemon.event(f"{away} unreachable", after=seen)
            extra = '[[route]]\nfrom = "in.more"\nto = "out"\nmax_rate = 100\n'
            config.write_text(config.read_text() + extra)
            daemon.reload()
            told = await daemon.event("reloaded", after=seen)
            assert told["keys"] == ["route"]
            assert told["out_of_reach"]
            await server.accept()
            if away == "broker":
                await daemon.event("consuming", after=seen)  # It declares the route first.
            await raw.publish(delayed("through the new route", 300, through="in.more"))
            await inbox.got([b"through the new route"])
            assert await daemon.stop() == 0


async def test_check_asks_the_daemon_too(
    place: OwnVhost, postgres: Postgres, schema: str, delayer: Run, tmp_path: Path
) -> None:
    """Either may reach what the other does not: another user, another environment, a secret that it read earlier."""
    listen = f"127.0.0.1:{ports.reserve()}"
    config = tmp_path / "delayer.toml"
    direct = postgres.url(schema)
    async with Proxy(postgres.port) as proxy:
        place.write(config, "store", {"http": {"listen": listen}})
        through = postgres.url(schema, port=proxy.port)
        async with DaemonProcess({"STORE__URL": through}, config=config, serving=True) as daemon:
            await daemon.ready()

            async def said(store: str, expect: int) -> list[dict[str, str]]:
                environ = {"DELAYER_CONFIG": str(config), "DELAYER_BROKER__URL": place.url, "DELAYER_STORE__URL": store}
                return await asyncio.to_thread(rows, delayer, "daemon", expect=expect, **environ)

            assert await said(direct, 0) == []
            dead = postgres.url(schema, port=ports.reserve())
            [row] = await said(dead, 3)
            assert (row["result"], "store" in row["found"]) == ("note", True)
            await proxy.refuse()
            await daemon.event("store unreachable")
            [row] = await said(direct, 1)
            assert row["result"] == "off"
            assert "store" in row["found"]
            [row] = await said(dead, 3)
            assert (row["result"], "is not ready" in row["found"]) == ("note", True), "both, for the same reason"
            daemon.signal(signal.SIGSTOP)
            [row] = await said(direct, 1)
            assert (row["result"], "does not answer" in row["found"]) == ("off", True)
            daemon.signal(signal.SIGCONT)
            assert await daemon.stop() == 0
