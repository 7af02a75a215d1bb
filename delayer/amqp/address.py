"""Broker addresses: ``amqp://`` and ``amqps://`` URLs."""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

_PORTS = {"amqp": 5672, "amqps": 5671}
# RabbitMQ's name for each parameter, and aio-pika's, so that one URL works for both libraries.
_PARAMETERS = {
    "heartbeat": "heartbeat",
    "connection_timeout": "connection_timeout",
    "auth_mechanism": "auth_mechanism",
    "auth": "auth_mechanism",
    "cacertfile": "cafile",
    "cafile": "cafile",
    "certfile": "certfile",
    "keyfile": "keyfile",
    "verify": "verify",
    "server_name_indication": "server_name",
}
_VERIFY = {"verify_peer": True, "verify_none": False, "true": True, "false": False, "1": True, "0": False}
_MECHANISMS = ("PLAIN", "EXTERNAL")


@dataclass(frozen=True, slots=True)
class Address:
    """The broker's address and the login. ``repr`` and ``str`` never show the password. ``heartbeat`` and ``timeout``
    are seconds; None if the URL does not set them. ``server_name`` is the host name in the broker's certificate, if not
    ``host``. ``at``: which of the host's addresses to connect to."""

    host: str
    port: int
    vhost: str
    user: str
    password: str = field(repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    auth_mechanism: str = "PLAIN"
    heartbeat: float | None = None
    timeout: float | None = None
    server_name: str | None = None
    at: str = ""

    @classmethod
    def parse_all(cls, urls: str) -> list[Self]:
        """Read URLs that are separated by commas. Raises as :meth:`parse`."""
        return [cls.parse(url) for url in urls.split(",")]

    @classmethod
    def parse(cls, url: str) -> Self:
        """Parse ``amqp[s]://user:password@host:port/vhost?parameters``.

        Scheme and host are required; the defaults are guest, guest, 5672 or 5671, and ``/``. Parameters: ``heartbeat``
        (s, 0 means none), ``connection_timeout`` (ms, as in RabbitMQ's URLs), ``auth_mechanism`` (plain, external), and
        for amqps ``cafile``, ``certfile``, ``keyfile``, ``verify`` (verify_peer, verify_none),
        ``server_name_indication``. Raises ValueError with the expected form; the text never contains the URL.
        """
        try:
            parts = urlsplit(url)
            host = parts.hostname or ""
            host.encode("idna")  # Labels have 1 to 63 bytes.
        except ValueError:
            raise ValueError("broker URL: expected amqp://user:password@host:port/vhost with a valid host") from None
        if parts.scheme not in _PORTS:
            raise ValueError("broker URL: expected it to begin with amqp:// or amqps://")
        port = _port(parts)
        if not host:
            raise ValueError("broker URL: expected a host name after // (and @)")
        if parts.fragment or "/" in parts.path[1:]:
            raise ValueError("broker URL: expected / and # in user, password and vhost to be written %2F and %23")
        vhost = unquote(parts.path[1:]) or "/"
        if (size := len(vhost.encode())) > 127:  # The limit of AMQP and its libraries. RabbitMQ itself allows 255.
            raise ValueError(f"broker URL: expected the name of a vhost of at most 127 bytes, found {size}")
        query = _query(parts.query)
        mechanism = query.get("auth_mechanism", "plain").upper()
        if mechanism not in _MECHANISMS:
            raise ValueError("broker URL: expected auth_mechanism to be plain or external")
        secure = parts.scheme == "amqps"
        if not secure and query.keys() & {"cafile", "certfile", "keyfile", "verify", "server_name"}:
            raise ValueError("broker URL: certificates and verification need amqps://")
        return cls(
            host=host,
            port=port,
            vhost=vhost,
            user=unquote(parts.username) if parts.username else "guest",
            password="guest" if parts.password is None else unquote(parts.password),
            tls=_context(query) if secure else None,
            auth_mechanism=mechanism,
            heartbeat=_number(query, "heartbeat"),
            timeout=None if (timeout_ms := _number(query, "connection_timeout")) is None else timeout_ms / 1000,
            server_name=query.get("server_name"),
        )

    def __str__(self) -> str:
        scheme = "amqp" if self.tls is None else "amqps"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{self.user}@{host}:{self.port}/{'' if self.vhost == '/' else self.vhost}"


def _port(parts: SplitResult) -> int:
    # Do not chain the cause: if a password has an unescaped / or @, urlsplit reads part of it as the port.
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port is None:
        return _PORTS[parts.scheme]
    if port == 0:
        raise ValueError("broker URL: expected a port of 1 to 65535 (and / and @ in a password written %2F and %40)")
    return port


def _query(text: str) -> Mapping[str, str]:
    found = {}
    for name, value in parse_qsl(text, keep_blank_values=True):
        if name not in _PARAMETERS:
            # Show only names of lower-case letters, because another name could be the rest of a password.
            shown = f", found {name!r}" if re.fullmatch("[a-z_]{1,40}", name) else ""
            raise ValueError(f"broker URL: expected a parameter of {', '.join(sorted(_PARAMETERS))}{shown}")
        found[_PARAMETERS[name]] = value
    return found


def _number(query: Mapping[str, str], name: str) -> float | None:
    value = query.get(name)
    if value is None:
        return None
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,6})?", value):
        raise ValueError(f"broker URL: expected {name} to be a number of 0 or more")
    return float(value)


def _context(query: Mapping[str, str]) -> ssl.SSLContext:
    """A TLS context that verifies certificate and host name by the system's CAs or the cafile, unless verify_none."""
    verify = _VERIFY.get(query.get("verify", "verify_peer").lower())
    if verify is None:
        raise ValueError("broker URL: expected verify to be verify_peer or verify_none")
    if "keyfile" in query and "certfile" not in query:
        raise ValueError("broker URL: expected certfile next to keyfile")
    try:
        context = ssl.create_default_context(cafile=query.get("cafile"))
    except OSError as error:
        raise ValueError(f"broker URL: expected cafile to be a readable PEM file: {error}") from error
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if "certfile" in query:
        try:
            context.load_cert_chain(query["certfile"], query.get("keyfile"), password="")
        except OSError as error:
            raise ValueError(f"broker URL: expected certfile and keyfile to be readable PEM files: {error}") from error
    return context
