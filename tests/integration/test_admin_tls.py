"""Administration over amqps: verified by default, with client certificates, by the same URL as everything else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme

from delayer.broker.admin import Admin
from delayer.broker.errors import BrokerUnreachable
from delayer.core.cascade import intake_topology
from tests.support.servers import Certificates, RabbitMQ


@dataclass(frozen=True)
class Secure:
    """A broker that wants a client certificate, and the files of one."""

    broker: RabbitMQ
    ca: Path
    certificate: Path
    key: Path

    def url(self, *, host: str = "localhost", more: str = "") -> str:
        client = f"&certfile={self.certificate}&keyfile={self.key}"
        return f"{self.broker.tls_url(host=host)}?cafile={self.ca}{client}{more}"


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    at = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(at / "ca.pem")
    for name, issued in (("server", authority.issue_cert("localhost")), ("client", authority.issue_cert("delayer"))):
        issued.private_key_pem.write_to_path(at / f"{name}.key")
        for index, pem in enumerate(issued.cert_chain_pems):
            pem.write_to_path(at / f"{name}.pem", append=index > 0)
    files = Certificates(at / "ca.pem", at / "server.pem", at / "server.key", verify_client=True)
    with RabbitMQ(tls=files) as broker:
        yield Secure(broker, at / "ca.pem", at / "client.pem", at / "client.key")


async def test_the_topology_is_declared_over_tls(secure: Secure) -> None:
    async with await Admin.connect(secure.url()) as admin:
        await admin.declare(intake_topology())
        assert await admin.depths(["delays"]) == {"delays": 0}


async def test_a_certificate_for_another_host_is_not_accepted(secure: Secure) -> None:
    with pytest.raises(BrokerUnreachable, match="CERTIFICATE_VERIFY_FAILED"):
        await Admin.connect(secure.url(host="127.0.0.1"))


async def test_the_url_can_say_whose_certificate_to_expect(secure: Secure) -> None:
    async with await Admin.connect(secure.url(host="127.0.0.1", more="&server_name_indication=localhost")) as admin:
        assert not await admin.queue_exists("nowhere")


async def test_an_unknown_authority_is_not_accepted(secure: Secure) -> None:
    with pytest.raises(BrokerUnreachable, match="CERTIFICATE_VERIFY_FAILED"):
        await Admin.connect(secure.broker.tls_url())


async def test_without_a_client_certificate_the_broker_hangs_up(secure: Secure) -> None:
    with pytest.raises(BrokerUnreachable):
        await Admin.connect(f"{secure.broker.tls_url()}?cafile={secure.ca}")
