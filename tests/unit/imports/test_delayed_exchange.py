"""Lines of a dump of the delayed-message plugin's tables."""

from __future__ import annotations

import base64

import pytest

from delayer.amqp.properties import Properties, encode_headers, entry, long_string
from delayer.core.message import Target
from delayer.imports.files import Plan, Skipped, Unreadable, read_dumped
from tests.support.raw import Props, number, text

PLAN = Plan(b"/", {b"orders.delayed": Target(b"orders.out", b""), b"mail.delayed": Target(b"mail", b"outbox")})
HEADERS = Props(headers=((b"x-delay", number("I", 5_000)), (b"tenant", text("acme"))), delivery_mode=2).encode()


def line(*fields: bytes, due_ms: int = 1_796_036_393_875) -> bytes:
    return b" ".join([b"%d" % due_ms, *map(base64.b64encode, fields)])


def test_a_message_goes_where_the_route_of_its_exchange_leads() -> None:
    item = read_dumped(line(b"/", b"orders.delayed", b"orders.eu", HEADERS, b"\0body"), PLAN)
    parcel = item.parcel  # type: ignore[union-attr]
    assert (parcel.due_ms, parcel.exchange, parcel.routing_key) == (1_796_036_393_875, b"orders.delayed", b"orders.eu")
    assert (parcel.properties, parcel.body) == (HEADERS, b"\0body")
    assert parcel.target == Target(b"orders.out", b"orders.eu")
    of_mail = read_dumped(line(b"/", b"mail.delayed", b"x", HEADERS, b""), PLAN)
    assert of_mail.parcel.target == Target(b"mail", b"outbox")  # type: ignore[union-attr]
    other = read_dumped(line(b"/", b"other", b"x", HEADERS, b""), PLAN)
    assert other.parcel.target == Target(b"other", b"x")  # type: ignore[union-attr]


def test_more_keys_are_copies_that_act_again() -> None:
    cc = entry(b"CC", b"A" + len(long_string(b"b")).to_bytes(4, "big") + long_string(b"b"))
    told = encode_headers(cc)
    both = read_dumped(line(b"/", b"x", b"a\0b", told, b""), PLAN)
    assert both.parcel.properties == told  # type: ignore[union-attr]
    blind = read_dumped(line(b"/", b"x", b"a\0b\0c", told, b""), PLAN)
    properties = Properties.parse(blind.parcel.properties)  # type: ignore[union-attr]
    bcc = properties.get(b"BCC")
    assert bcc is not None
    assert bcc.value == ["c"]
    assert blind.parcel.routing_key == b"a"  # type: ignore[union-attr]


def test_other_output_of_rabbitmqctl() -> None:
    assert (read_dumped(b"", PLAN), read_dumped(b"ok", PLAN), read_dumped(b"12", PLAN)) == (None, None, 12)


def test_other_virtual_hosts_are_left() -> None:
    assert read_dumped(line(b"other", b"x", b"a", HEADERS, b""), PLAN) == Skipped("of virtual host 'other'")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"nonsense", "6 fields"),
        (b"{error,badarg} 1 2 3 4 5", "due instant"),
        (b"17 Lw== *** YQ== MAA= YQ==", "base64"),
        (line(b"/", b"x" * 256, b"a", HEADERS, b""), "at most 255 bytes"),
        (line(b"/", b"x", b"a\0" + b"b" * 256, HEADERS, b""), "at most 255 bytes"),
        (line(b"/", b"x", b"a", HEADERS[:-3], b""), "property bytes are broken"),
        (line(b"/", b"x", b"a", HEADERS, b"body")[:-20], "6 fields"),
    ],
)
def test_lines_without_a_message(text: bytes, why: str) -> None:
    with pytest.raises(Unreadable, match=why):
        read_dumped(text, PLAN)


def test_names_that_are_no_text_are_parameters_too() -> None:
    plan = Plan(b"\xff", {b"\xfe": Target(b"\xfd", b"")})
    assert plan.as_dict() == {"vhost": "\\xff", "exchanges": {"\\xfe": ["\\xfd", ""]}}
