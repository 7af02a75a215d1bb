"""Broker URLs: their parts, and helpful errors that do not show the password."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
import trustme

from delayer.amqp.address import Address


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("amqp://h", ("h", 5672, "/", "guest", "guest")),
        ("amqp://h/%2F", ("h", 5672, "/", "guest", "guest")),
        ("amqp://h/shop", ("h", 5672, "shop", "guest", "guest")),
        ("amqp://h/a%2Fb%20c", ("h", 5672, "a/b c", "guest", "guest")),
        ("amqp://u:p@h:1234/v", ("h", 1234, "v", "u", "p")),
        ("amqp://u%40x:p%2F%3A%40@h", ("h", 5672, "/", "u@x", "p/:@")),
        ("amqp://u:@h", ("h", 5672, "/", "u", "")),
        ("amqp://u@h", ("h", 5672, "/", "u", "guest")),
        ("amqp://[::1]:99/v", ("::1", 99, "v", "guest", "guest")),
        ("amqps://h", ("h", 5671, "/", "guest", "guest")),
    ],
)
def test_the_parts_of_a_url(url: str, expected: tuple[str, int, str, str, str]) -> None:
    found = Address.parse(url)
    assert (found.host, found.port, found.vhost, found.user, found.password) == expected
    assert (found.tls is not None) == url.startswith("amqps")


def test_parameters() -> None:
    found = Address.parse("amqp://h/?heartbeat=7&connection_timeout=2500&auth_mechanism=EXTERNAL")
    assert (found.heartbeat, found.timeout, found.auth_mechanism) == (7.0, 2.5, "EXTERNAL")
    plain = Address.parse("amqp://h/?auth=plain")
    assert (plain.heartbeat, plain.timeout, plain.auth_mechanism) == (None, None, "PLAIN")


def test_verification_is_on_unless_it_is_turned_off() -> None:
    on = Address.parse("amqps://h").tls
    assert on is not None
    assert (on.verify_mode, on.check_hostname) == (ssl.CERT_REQUIRED, True)
    off = Address.parse("amqps://h?verify=verify_none").tls
    assert off is not None
    assert (off.verify_mode, off.check_hostname) == (ssl.CERT_NONE, False)


def test_certificate_files(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    pair = authority.issue_cert("client")
    pair.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    pair.private_key_pem.write_to_path(tmp_path / "key.pem")
    where = f"amqps://h?cafile={tmp_path}/ca.pem&certfile={tmp_path}/cert.pem&keyfile={tmp_path}/key.pem"
    found = Address.parse(where + "&server_name_indication=broker.example")
    assert found.tls is not None
    assert len(found.tls.get_ca_certs()) == 1
    assert found.server_name == "broker.example"
    for key in ("cafile", "certfile", "keyfile"):
        with pytest.raises(ValueError, match=key):
            Address.parse(where.replace(f"{key}={tmp_path}", f"{key}={tmp_path}/missing"))


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("", "amqp://"),
        ("localhost", "begin with amqp:// or amqps://"),
        ("amqp://u:secret@", "host name"),
        ("amqp://u:secret@rabbit..local/", "valid host"),
        (f"amqp://u:secret@{'h' * 64}.local/", "valid host"),
        (f"amqp://u:secret@{'ü' * 60}.local/", "valid host"),
        ("amqp://u:secret@h:0", "port of 1 to 65535"),
        ("amqp://u:se/secret@h", "port of 1 to 65535"),
        ("amqp://u:secret#x@h", "port of 1 to 65535"),
        ("amqp://u:1?secret@h", "a parameter of"),
        ("amqp://u:1/secret/x@h", "%2F"),
        ("amqp://u:secret@[h", "expected amqp://"),
        ("amqp://u:secret@h/a/b", "%2F"),
        ("amqp://u:secret@h/a#b", "%23"),
        ("amqp://u:secret@h/?heartbeats=5", "a parameter of .*found 'heartbeats'"),
        ("amqp://u:secret@h/?heartbeat=-1", "heartbeat to be a number"),
        ("amqp://u:secret@h/?connection_timeout=1e3", "connection_timeout to be a number"),
        ("amqp://u:secret@h/?auth_mechanism=magic", "plain or external"),
        ("amqp://u:secret@h/?cafile=x", "need amqps://"),
        ("amqps://u:secret@h/?verify=perhaps", "verify_peer or verify_none"),
        ("amqps://u:secret@h/?keyfile=x", "certfile next to keyfile"),
    ],
)
def test_errors_of_bad_urls_show_no_password(url: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as found:
        Address.parse(url)
    chain: BaseException | None = found.value
    while chain is not None:
        assert "secret" not in str(chain)
        chain = chain.__cause__


def test_the_password_is_never_shown() -> None:
    found = Address.parse("amqps://user:secret@h/v?verify=verify_none")
    assert "secret" not in f"{found} {found!r} {found!s}"
    assert str(found) == "amqps://user@h:5671/v"
    assert str(Address.parse("amqp://[::1]")) == "amqp://guest@[::1]:5672/"
