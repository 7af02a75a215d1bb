"""What is said about a certificate that was not believed."""

from __future__ import annotations

import ssl

import pytest

from delayer.broker.errors import BrokerUnreachable
from delayer.cli.errors import failure
from delayer.core.errors import certificate_advice
from delayer.store.errors import lost

SAID = "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: {} (_ssl.c:1006)"


@pytest.mark.parametrize(
    ("said", "next_step"),
    [
        (SAID.format("unable to get local issuer certificate"), "say in FILE who signed"),
        (SAID.format("self-signed certificate"), "say in FILE who signed"),
        (SAID.format("Hostname mismatch, certificate is not valid for '10.0.0.1'."), "name the host in URL"),
        (SAID.format("IP address mismatch, certificate is not valid for '10.0.0.1'."), "name the host in URL"),
        (SAID.format("certificate has expired"), "renew"),
        ("SSL error: certificate verify failed", "say in FILE who signed"),
        ("Connect call failed", ""),
    ],
)
def test_advice(said: str, next_step: str) -> None:
    found = certificate_advice(said, "FILE", "URL")
    assert found.startswith(next_step)
    assert bool(found) is bool(next_step)


def test_certificate_errors_name_the_peer() -> None:
    said = SAID.format("self-signed certificate")
    assert "Next: say in broker.ca_file who signed" in failure(BrokerUnreachable(f"h:1 vhost '/': {said}")).message
    assert "Next: check broker.url, and that" in failure(BrokerUnreachable("h:1 vhost '/': refused")).message
    told = failure(lost("connect", ssl.SSLCertVerificationError(1, said))).message
    assert "Next: say in store.url, by sslrootcert=FILE, who signed the certificate" in told
