"""Certificates, good and bad ones, and a TLS listener before a server without TLS.

    papers = Papers.issue(tmp_path)
    async with TlsFront(broker.port, papers["expired"]) as front:
        url = f"amqps://guest:guest@localhost:{front.port}/?cafile={papers.ca}"

Runs in the test's own event loop.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal, NamedTuple, Self

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.support.proxy import Proxy

HOST = "localhost"
RIGHT, WRONG_HOST, EXPIRED, SELF_SIGNED, STRANGER = "right", "wrong host", "expired", "self-signed", "unknown authority"
BAD: Mapping[str, str] = {
    WRONG_HOST: "Hostname mismatch",
    EXPIRED: "certificate has expired",
    SELF_SIGNED: "self-signed certificate|self signed certificate",
    STRANGER: "unable to get local issuer certificate",
}
"""OpenSSL's error for each."""
_SSL_REQUEST = b"\x00\x00\x00\x08\x04\xd2\x16\x2f"
_CHUNK = 64 * 1024


class Pair(NamedTuple):
    """PEM files."""

    certificate: Path
    key: Path


@dataclass(frozen=True)
class Papers:
    """``ca`` is the authority that clients must trust. ``pairs`` has the servers' pairs by name, and ``client``."""

    ca: Path
    pairs: Mapping[str, Pair]

    def __getitem__(self, name: str) -> Pair:
        return self.pairs[name]

    @classmethod
    def issue(cls, directory: Path) -> Self:
        authority = trustme.CA()
        authority.cert_pem.write_to_path(directory / "ca.pem")
        now = datetime.now(UTC)
        past = {"not_before": now - timedelta(days=9), "not_after": now - timedelta(days=2)}
        issued = {
            RIGHT: authority.issue_cert(HOST),
            WRONG_HOST: authority.issue_cert("elsewhere.example"),
            EXPIRED: authority.issue_cert(HOST, **past),
            STRANGER: trustme.CA().issue_cert(HOST),
            "client": authority.issue_cert("delayer"),
        }
        pairs = {SELF_SIGNED: _self_signed(directory, now)}
        for name, leaf in issued.items():
            pairs[name] = pair = _pair(directory, name)
            leaf.private_key_pem.write_to_path(pair.key)
            # Without the authority's certificate: clients have it already, or must not get it from here.
            leaf.cert_chain_pems[0].write_to_path(pair.certificate)
        return cls(directory / "ca.pem", pairs)


def _pair(directory: Path, name: str) -> Pair:
    stem = name.replace(" ", "-")
    return Pair(directory / f"{stem}.pem", directory / f"{stem}.key")


def _self_signed(directory: Path, now: datetime) -> Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, HOST)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(HOST)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pair = _pair(directory, SELF_SIGNED)
    pair.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    pair.key.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return pair


class TlsFront(Proxy):
    """A proxy that presents a certificate and forwards the decrypted bytes. ``heard`` counts the bytes of clients after
    a handshake. It stays 0 if a client rejects the certificate, so that client did not send a password."""

    def __init__(self, port: int, pair: Pair, *, speaks: Literal["amqp", "postgres"] = "amqp") -> None:
        super().__init__(port)
        self.heard = 0
        self.overhears = self._hear
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(pair.certificate, pair.key)
        self._postgres = speaks == "postgres"
        self.tls = None if self._postgres else self._context

    def _hear(self, data: bytes) -> None:
        self.heard += len(data)

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._postgres:
            try:
                assert await reader.readexactly(len(_SSL_REQUEST)) == _SSL_REQUEST
                writer.write(b"S")
                await writer.start_tls(self._context)
            except (OSError, asyncio.IncompleteReadError):
                writer.close()
                return
        await super()._admit(reader, writer)
