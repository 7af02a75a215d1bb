"""Audit and compact as clients of a Spark Connect server: no Java here, and the same results."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pyarrow.dataset as ds
import pytest

from delayer.audit import remote
from delayer.audit.errors import JobFailed, JobImpossible, JobMisused
from delayer.core.secret import SecretUrl
from tests.audit.compacting import FEW, command, everything, filled, lawful, run_delayer, until_quiet
from tests.audit.connect import Server, server
from tests.audit.test_job import ODD, PASSWORD, secret
from tests.audit.test_reading import execute, fill, pack
from tests.support.place import eventually
from tests.support.postgres import Postgres
from tests.support.proxy import Proxy

pytestmark = pytest.mark.deadline(400)
BY_A_SCRIPT = ("/bin/sh", "-c", 'trap \'\' INT; exec "$0" "$@"')
"""As a script starts ``delayer … &``: with SIGINT ignored."""
NO_JAVA = {"JAVA_HOME": "/nowhere", "PATH": "/nowhere"}


@pytest.fixture(scope="module")
def connect() -> Iterator[Server]:
    with server() as started:
        yield started


@pytest.fixture
def stored(database: str) -> str:
    fill(database)
    return database


@pytest.fixture
def damaged(stored: str) -> str:
    pack(stored)
    execute(stored, "DELETE FROM message WHERE id = (SELECT min(id) FROM message)")
    return stored


@asynccontextmanager
async def auditing(
    connect: Server, url: str, work: Path, *more: str, program: Sequence[str] = ()
) -> AsyncIterator[asyncio.subprocess.Process]:
    arguments = ("audit", "--deep", "--no-broker", "--remote", connect.url, "--work", str(work), *more)
    async with command(url, *arguments, fault="", program=program, **NO_JAVA) as process:
        yield process


async def test_the_audit_has_the_same_figures_and_leaves_nothing(connect: Server, damaged: str, tmp_path: Path) -> None:
    work, results = tmp_path / ODD, tmp_path / "results"
    work.mkdir()
    async with auditing(connect, secret(damaged), work, "--json", "--results", str(results)) as process:
        told, said = await process.communicate()
    assert process.returncode == 1, said.decode()
    report = json.loads(told)
    assert {run["rule"] for run in report["rules"] if run["violations"]} == {"conservation"}
    assert report["totals"]["waiting"] + report["totals"]["packed"] == 2_999
    assert report["totals"]["packed"] > 500
    assert list(work.iterdir()) == []
    assert set(work.parent.iterdir()) == {work, results}, "the extract was in another directory"
    assert ds.dataset(results).count_rows() == len(report["rules"])
    pages = connect.pages()
    assert "delayer" in connect.log
    assert "message" in pages
    assert PASSWORD not in told.decode() + said.decode() + connect.log + pages


async def test_compact_packs_all(connect: Server, database: str) -> None:
    async with filled(database, FEW):
        before = await everything(database)
        arguments = ("compact", "--rows", "250", "--json", "--remote", connect.url)
        async with command(secret(database), *arguments, fault="", **NO_JAVA) as process:
            told, said = await process.communicate()
        assert process.returncode == 0, said.decode()
        assert told.count(b"\n") == 1, "on one line, as an audit's"
        assert await everything(database) == before
        assert FEW - 500 <= (await lawful(database))["compacted"] == json.loads(told)["messages"], "less a few rows"
    assert PASSWORD not in told.decode() + said.decode() + connect.log + connect.pages()


@pytest.mark.parametrize(
    ("number", "program"), [(signal.SIGTERM, ()), (signal.SIGINT, ()), (signal.SIGTERM, BY_A_SCRIPT)]
)
async def test_a_stop_ends_the_tasks_on_the_server(
    connect: Server, postgres: Postgres, stored: str, tmp_path: Path, number: signal.Signals, program: Sequence[str]
) -> None:
    async with Proxy(postgres.port) as proxy:
        proxy.slow(bytes_per_second=40_000)
        slow = stored.replace(f":{postgres.port}/", f":{proxy.port}/")
        async with auditing(connect, slow, tmp_path, program=program) as process:
            await eventually(lambda: list(tmp_path.glob("delayer-audit-*/message*")), bool, timeout=120.0)
            process.send_signal(number)
            told, said = await process.communicate()
        proxy.resume()
        assert (process.returncode, told) == (128 + number, b""), said.decode()
        assert "Traceback" not in said.decode()
        await until_quiet(stored, "delayer audit")
    await eventually(lambda: list(tmp_path.iterdir()), lambda left: not left, timeout=30.0)


async def test_errors_of_the_server_are_one_line(connect: Server, database: str, tmp_path: Path) -> None:
    rules = tmp_path / "delayer.toml"
    rules.write_text('[[audit.rule]]\nname = "mine"\nsql = "SELECT nonsense FROM messages"\nseverity = "warning"\n')
    given = ("--remote", connect.url, "--work")
    for arguments, code, reason in (
        (("--config", str(rules), "audit", "--deep", *given, str(tmp_path)), 2, "expected a SELECT with subject"),
        (("audit", "--deep", "--no-broker", *given, "/proc/none"), 3, "/proc/none"),
        (("compact", "--conf", "spark.executor.memory=1g", "--remote", connect.url), 2, "set it on the server"),
    ):
        if "compact" in arguments:
            async with filled(database, FEW):
                found, _, told = await run_delayer(database, *arguments)
        else:
            found, _, told = await run_delayer(database, *arguments)
        assert (found, reason in told) == (code, True), told
        assert "Traceback" not in told
        assert "QueryContextLogger" not in told
        assert len(told.splitlines()) <= 2, told


async def test_a_task_that_loses_the_store_names_it(
    connect: Server, postgres: Postgres, stored: str, tmp_path: Path
) -> None:
    async with Proxy(postgres.port) as proxy:
        proxy.slow(bytes_per_second=40_000)
        slow = stored.replace(f":{postgres.port}/", f":{proxy.port}/")
        async with auditing(connect, slow, tmp_path) as process:
            await eventually(lambda: list(tmp_path.glob("delayer-audit-*/message*")), bool, timeout=120.0)
            await proxy.refuse()
            _, said = await process.communicate()
    assert process.returncode == 3, said.decode()
    assert "the store" in said.decode().splitlines()[-1], said.decode()
    assert "Traceback" not in said.decode()


# ---- without a server


@asynccontextmanager
async def silent() -> AsyncIterator[tuple[str, list[asyncio.StreamWriter]]]:
    """The place of a server that accepts connections and never answers, as Spark's master does, and its clients."""
    clients: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: clients.append(writer), "127.0.0.1", 0)
    try:
        yield "{}:{}".format(*server.sockets[0].getsockname()), clients
    finally:
        for client in clients:
            client.transport.abort()
        server.close()
        await server.wait_closed()


async def test_a_port_that_is_not_spark_connects_is_reported_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "ANSWER_SECONDS", 0.5)

    def ask(place: str) -> None:
        with remote.session(SecretUrl(f"sc://{place}/;token=hunter2"), {}):
            pytest.fail("a session was made")

    async with silent() as (place, _):
        with pytest.raises(JobFailed, match=r"answers, but not as Spark Connect\. Next: check the port") as raised:
            await asyncio.to_thread(ask, place)
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("verb", ["audit", "compact"])
@pytest.mark.parametrize(
    ("number", "program"), [(signal.SIGTERM, ()), (signal.SIGINT, ()), (signal.SIGTERM, BY_A_SCRIPT)]
)
async def test_a_stop_ends_the_opening_of_a_session(
    database: str, tmp_path: Path, verb: str, number: signal.Signals, program: Sequence[str]
) -> None:
    arguments: tuple[str, ...] = ("audit", "--deep", "--work", str(tmp_path)) if verb == "audit" else ("compact",)
    async with filled(database, FEW), silent() as (place, clients):
        arguments += ("--remote", f"sc://{place}")
        async with command(database, *arguments, fault="", program=program, **NO_JAVA) as process:
            await eventually(lambda: len(clients), lambda n: n > 1, timeout=60.0)  # After the look whether it listens.
            process.send_signal(number)
            async with asyncio.timeout(15.0):
                _, said = await process.communicate()
    assert process.returncode == 128 + number, said.decode()
    assert "Traceback" not in said.decode()


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("sc://host", "host:15002"),
        ("sc://host:443/;use_ssl=true;token=abc:def/", "host:443"),
        ("sc://[::1]:15003", "[::1]:15003"),
    ],
)
def test_the_place_of_a_server(url: str, place: str) -> None:
    assert remote.place_of(SecretUrl(url)) == place


@pytest.mark.parametrize("url", ["spark://host:7077", "sc://", "sc://host:port", "sc://me:hunter2@host", "host:15002"])
def test_other_urls_are_refused_and_not_quoted(url: str) -> None:
    with pytest.raises(JobMisused, match="expected sc://HOST:PORT") as raised:
        remote.place_of(SecretUrl(url))
    assert "hunter2" not in str(raised.value)


def test_a_server_out_of_reach_is_named_without_its_token() -> None:
    url = SecretUrl("sc://127.0.0.1:1/;token=hunter2")
    with (
        pytest.raises(JobFailed, match=r"127\.0\.0\.1:1 is out of reach: .*check --remote") as raised,
        remote.session(url, {}),
    ):
        pytest.fail("a session was made")
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("parameter", ["x-api-key=hunter2==", "hunter2", "session_id=hunter2"])
def test_a_parameter_that_spark_refuses_is_not_quoted(monkeypatch: pytest.MonkeyPatch, parameter: str) -> None:
    monkeypatch.setattr(remote.sessions, "check_reachable", lambda *_: None)
    with (
        pytest.raises(JobMisused, match="expected parameters as KEY=VALUE") as raised,
        remote.session(SecretUrl(f"sc://127.0.0.1:1/;{parameter}"), {}),
    ):
        pytest.fail("a session was made")
    assert "hunter2" not in str(raised.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "grpc", None)
    with pytest.raises(JobImpossible, match="grpc"), remote.session(SecretUrl("sc://127.0.0.1:1"), {}):
        pytest.fail("a session was made")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("audit", "--remote", "sc://h"), "--remote: expected --deep"),
        (("audit", "--deep", "--remote", "sc://h"), "expected --work with it"),
        (("audit", "--deep", "--remote", "sc://h", "--work", "/tmp", "--master", "yarn"), "expected one of them"),
        (("compact", "--remote", "sc://h", "--master", "yarn"), "expected one of them"),
        (("compact", "--remote", "yarn"), "expected sc://HOST:PORT"),
    ],
)
async def test_options_that_do_not_fit_are_refused(arguments: tuple[str, ...], told: str) -> None:
    code, _, said = await run_delayer("postgresql://127.0.0.1:1/none", *arguments)
    assert (code, told in said) == (2, True), said
