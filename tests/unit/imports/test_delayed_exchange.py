"""Lines of a dump of the delayed-message plugin's tables."""

from __future__ import annotations

import base64

import pytest

from delayer.core.message import Target
from delayer.imports.files import DumpPlan, Unreadable, read_dumped
from tests.support.raw import Props, number, text

PLAN = DumpPlan(b"/", {b"orders.delayed": Target(b"orders.out", b""), b"mail.delayed": Target(b"mail", b"outbox")})
HEADERS = Props(headers=((b"x-delay", number("I", 5_000)), (b"tenant", text("acme"))), delivery_mode=2).encode()


def line(*fields: bytes, due_ms: int = 1_796_036_393_875) -> bytes:
    return b" ".join([b"%d" % due_ms, *map(base64.b64encode, fields)])


def test_other_output_of_rabbitmqctl() -> None:
    assert (read_dumped(b"", PLAN), read_dumped(b"ok", PLAN), read_dumped(b"12", PLAN)) == (None, None, 12)


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
    plan = DumpPlan(b"\xff", {b"\xfe": Target(b"\xfd", b"")})
    assert plan.as_dict() == {"vhost": "\\xff", "exchanges": {"\\xfe": ["\\xfd", ""]}}
