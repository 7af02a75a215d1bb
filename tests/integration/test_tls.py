"""TLS with right and wrong certificates, for each of our clients: the hot path's own AMQP, aio-pika for administration,
the management API, asyncpg, and libpq for bulk reads. A server with a bad certificate receives nothing, least of all a
password."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from delayer.amqp.address import Address
from delayer.amqp.connection import Connection
from delayer.amqp.errors import BrokerLost
from delayer.audit.connection import reading
from delayer.broker.admin import Admin
from delayer.broker.management_api import Management
from delayer.broker.verify import bindings_from
from delayer.core.errors import StoreLost
from delayer.core.secret import SecretUrl
from delayer.store import pool
from tests.support import tls
from tests.support.servers import Postgres, RabbitMQ
from tests.support.tls import BAD, RIGHT, WRONG_HOST, Papers, TlsFront

SECRET = "Sesame-TLS-3"
Connect = Callable[[str], Awaitable[None]]


async def by_wire(url: str) -> None:
    connection = await Connection.open(Address.parse(url), name="test", timeout=10)
    await connection.close()


async def by_admin(url: str) -> None:
    async with await Admin.connect(url) as admin:
        assert not await admin.queue_exists("nowhere")


async def by_management(url: str) -> None:
    """The client of the management API trusts the same authority as the broker's URL."""
    address = Address.parse(url)
    management = Management(f"https://guest:guest@{address.host}:{address.port}", "/", tls=address.tls)
    await bindings_from(management, "amq.topic")


async def by_asyncpg(url: str) -> None:
    connection = await pool.connect(url, "test")
    try:
        assert await connection.fetchval("SELECT 1") == 1
    finally:
        await pool.close(connection)


async def by_libpq(url: str) -> None:
    """The client of `audit --deep`: another library, with the TLS of libpq."""

    def read() -> None:
        with reading(SecretUrl(url), "", 1 << 20) as connection:
            assert connection.rows("SELECT 1") == [(1,)]

    await asyncio.to_thread(read)


CLIENTS: dict[str, Connect] = {
    "wire": by_wire,
    "admin": by_admin,
    "management": by_management,
    "asyncpg": by_asyncpg,
    "libpq": by_libpq,
}


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    return Papers.issue(tmp_path_factory.mktemp("tls"))


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Case:
    """One client, its server, and the URL that goes through a front."""

    def __init__(self, client: str, rabbitmq: RabbitMQ, postgres: Postgres) -> None:
        self.connect = CLIENTS[client]
        self._store = client in ("asyncpg", "libpq")
        self.libpq = client == "libpq"
        management = client == "management"
        self.port = postgres.port if self._store else rabbitmq.management_port if management else rabbitmq.port

    def front(self, pair: tls.Pair) -> TlsFront:
        return TlsFront(self.port, pair, speaks="postgres" if self._store else "amqp")

    def url(self, port: int, ca: Path | None, *, host: str = tls.HOST, verify: bool = True) -> str:
        if self._store:
            mode = "sslmode=verify-full" if verify else "sslmode=require"
            root = f"&sslrootcert={ca}" if ca and verify else ""
            return f"postgresql://postgres:{SECRET}@{host}:{port}/postgres?{mode}{root}"
        parameters = [*([f"cafile={ca}"] if ca else []), *([] if verify else ["verify=verify_none"])]
        return f"amqps://guest:guest@{host}:{port}/?{'&'.join(parameters)}"


@pytest.fixture
def case(client: str, rabbitmq: RabbitMQ, postgres: Postgres) -> Case:
    return Case(client, rabbitmq, postgres)


async def test_the_right_certificate(case: Case, papers: Papers) -> None:
    async with case.front(papers[RIGHT]) as front:
        await case.connect(case.url(front.port, papers.ca))
        assert front.heard


@pytest.mark.parametrize("bad", BAD)
async def test_a_bad_certificate(case: Case, papers: Papers, bad: str) -> None:
    async with case.front(papers[bad]) as front:
        with pytest.raises((BrokerLost, StoreLost), match="certificate" if case.libpq else BAD[bad]) as refused:
            await case.connect(case.url(front.port, papers.ca))
        assert not front.heard
    assert SECRET not in str(refused.value)


async def test_without_the_authority_the_right_one_is_unknown(case: Case, papers: Papers, client: str) -> None:
    if client in ("asyncpg", "libpq"):
        pytest.skip("verify-full without sslrootcert looks for a file in the home directory, and fails without one")
    async with case.front(papers[RIGHT]) as front:
        with pytest.raises(BrokerLost, match="CERTIFICATE_VERIFY_FAILED"):
            await case.connect(case.url(front.port, None))
        assert not front.heard


async def test_verification_can_be_switched_off(case: Case, papers: Papers) -> None:
    """amqps verifies by default; Postgres URLs verify only on request."""
    async with case.front(papers[WRONG_HOST]) as front:
        await case.connect(case.url(front.port, papers.ca, verify=False))
        assert front.heard


async def test_a_server_without_tls_is_rejected(case: Case, papers: Papers) -> None:
    with pytest.raises((BrokerLost, StoreLost)) as refused:
        await case.connect(case.url(case.port, papers.ca))
    assert SECRET not in str(refused.value)
