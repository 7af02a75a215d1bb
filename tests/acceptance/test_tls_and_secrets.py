"""The whole daemon over TLS on both sides; and passwords, which no outside observer can find."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from delayer.amqp.connection import Connection
from delayer.amqp.errors import ConnectionLost
from delayer.broker.admin import Admin
from tests.acceptance.own_vhost import OwnVhost, delayed
from tests.acceptance.world import BROKER_SECRET, STORE_SECRET, secret_store_url
from tests.support.daemon import EXECUTABLE, DaemonProcess
from tests.support.ledger import Ledger
from tests.support.servers import Certificates, Postgres, RabbitMQ
from tests.support.tls import BAD, RIGHT, STRANGER, Papers, TlsFront

SECRETS = ("Sesame", "Broker/1", "Broker%2F1", "Store/2", "Store%2F2")
"""Pieces of the passwords, in every spelling."""


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    return Papers.issue(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def secure(papers: Papers) -> Iterator[tuple[RabbitMQ, Postgres]]:
    """Both servers with the right certificates; the broker requires one of the client."""
    pair = papers[RIGHT]
    certificates = Certificates(papers.ca, pair.certificate, pair.key, verify_client=True)
    with RabbitMQ(tls=certificates) as rabbitmq, Postgres(tls=pair) as postgres:
        yield rabbitmq, postgres


async def run(*arguments: str) -> tuple[int, str]:
    """Run a command of the command line. Return its exit code and its output."""
    process = await asyncio.create_subprocess_exec(
        str(EXECUTABLE), *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return process.returncode, output.decode()


async def test_everything_over_tls(secure: tuple[RabbitMQ, Postgres], papers: Papers, tmp_path: Path) -> None:
    """Upgrade, check, run, status: every connection is encrypted, and both certificates are verified."""
    rabbitmq, postgres = secure
    url = postgres.tls_url(postgres.add_database(), papers.ca)
    client = papers["client"]
    broker = {"url": rabbitmq.tls_url(), "ca_file": str(papers.ca)}
    broker |= {"cert_file": str(client.certificate), "key_file": str(client.key)}
    config = tmp_path / "delayer.toml"
    sections: dict[str, dict[str, Any]] = {"broker": broker, "store": {"url": url}}
    lines = ['mode = "store"']
    for section, table in sections.items():
        lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    config.write_text("\n".join(lines) + "\n")
    code, said = await run("--config", str(config), "db", "upgrade")
    assert code == 0, said
    async with Ledger.open(rabbitmq.url(), random.Random(2)) as ledger, DaemonProcess({}, config=config) as daemon:
        await daemon.ready()
        await ledger.publish(200, longest_ms=1_000)
        await ledger.all_back()
        ledger.verdict().assert_kept()
        for verb in ("check", "status"):
            code, said = await run("--config", str(config), verb)
            assert code == 0, said
        ours = "FROM pg_stat_activity JOIN pg_stat_ssl USING (pid) WHERE application_name LIKE 'delayer%'"
        rows = await asyncio.to_thread(postgres.execute, f"SELECT {ours} AND ssl")
        assert int(rows.split()[-1]) >= 3
        assert await asyncio.to_thread(postgres.execute, f"SELECT {ours} AND NOT ssl") == "SELECT 0"
        listed = await asyncio.to_thread(rabbitmq.ctl, "list_connections", "ssl", "client_properties")
        assert [line for line in listed.splitlines() if line.startswith("true") and "delayer intake" in line], listed
        assert not [line for line in listed.splitlines() if line.startswith("false") and "delayer " in line], listed
        assert await daemon.stop() == 0


async def test_the_broker_demands_a_client_certificate(secure: tuple[RabbitMQ, Postgres], papers: Papers) -> None:
    """One URL serves the hot path and the administration, and can name the client's certificate."""
    rabbitmq, _ = secure

    def url(client: str) -> str:
        proof = f"&certfile={papers[client].certificate}&keyfile={papers[client].key}" if client else ""
        address = rabbitmq.tls_url(host="127.0.0.1")
        return f"{address}?cafile={papers.ca}&server_name_indication=localhost{proof}"

    await (await Connection.open(url("client"), name="test")).close()
    async with await Admin.connect(url("client")) as admin:
        assert not await admin.queue_exists("nowhere")
    for stranger in ("", STRANGER):
        with pytest.raises(ConnectionLost):
            await Connection.open(url(stranger), name="test")
    with pytest.raises(ConnectionLost):
        await Connection.open(f"amqp://127.0.0.1:{rabbitmq.tls_port}", name="test")


@pytest.mark.parametrize("bad", BAD)
async def test_a_bad_certificate_is_logged_and_the_daemon_waits_for_a_good_one(
    rabbitmq: RabbitMQ, postgres: Postgres, template: str, papers: Papers, bad: str
) -> None:
    """Broker and store both have one: the log names both with the reason, the daemon sends nothing to either, and stops
    on a signal."""
    database = postgres.add_database(template=template)
    async with (
        TlsFront(rabbitmq.port, papers[bad]) as broker,
        TlsFront(postgres.port, papers[bad], speaks="postgres") as store,
    ):
        environ = {
            "BROKER__URL": f"amqps://u:{BROKER_SECRET.replace('/', '%2F')}@localhost:{broker.port}/",
            "BROKER__CA_FILE": str(papers.ca),
            "STORE__URL": secret_store_url(postgres, database)
            .replace("127.0.0.1", "localhost")
            .replace(str(postgres.port), str(store.port))
            + f"?sslmode=verify-full&sslrootcert={papers.ca}",
        }
        async with DaemonProcess(environ) as daemon:
            told = [await daemon.event(f"{server} refused") for server in ("broker", "store")]
            assert all("CERTIFICATE_VERIFY_FAILED" in event["reason"] for event in told), told
            assert await daemon.stop() == 0
        assert broker.heard == store.heard == 0
        assert_clean(daemon.tail(1000))
    postgres.drop_database(database)


def assert_clean(text: str) -> None:
    found = [secret for secret in SECRETS if secret in text]
    assert not found, f"{found} in {text}"


async def test_passwords_do_not_appear_anywhere(
    place: OwnVhost, schema: str, postgres: Postgres, tmp_path: Path
) -> None:
    """No process arguments, server logs, connection lists, reports or logs contain them, also after the servers refuse
    them."""
    config = tmp_path / "delayer.toml"
    store = secret_store_url(postgres, schema)
    assert BROKER_SECRET.startswith("Sesame")
    assert STORE_SECRET.startswith("Sesame")
    place.write(config, "store", {"store": {"url": store}})
    async with place.working(config=config) as (daemon, raw, inbox):
        await raw.publish(delayed("one", 200), delayed("held", 0, through="in.missing"))
        await inbox.got([b"one"])
        await daemon.event("message held")
        parent = psutil.Process(daemon.pid)
        family = [parent, *parent.children(recursive=True)]
        for process in family:
            assert_clean(" ".join(process.cmdline()) + process.name())
        for verb in (["status"], ["status", "--json"], ["check"], ["topology", "verify"], ["db", "current"]):
            _, said = await run("--config", str(config), *verb)
            assert_clean(said)
        assert_clean(json.dumps(place.rabbitmq.api("GET", "/api/connections")))
        assert_clean(place.rabbitmq.log())
        assert await daemon.stop() == 0
    assert_clean(daemon.tail(10_000))
    assert_clean(postgres.log())
    place.rabbitmq.api("PUT", "/api/users/delayer", {"password": "changed", "tags": ""})
    for verb in ("check", "status", "run"):
        if verb == "run":
            async with DaemonProcess({}, config=config) as daemon:
                await daemon.event("broker refused")
                assert await daemon.stop() == 0
                said = daemon.tail(1000)
        else:
            code, said = await run("--config", str(config), verb)
            assert code in (1, 3), said
        assert "refused" in said.lower()
        assert_clean(said)
