"""Lines of a dump of the delayed-message plugin's tables."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from delayer.core.importing import ImportSelection
from delayer.core.message import Target
from delayer.imports.files import DelayedExchange, Unreadable
from tests.support.raw import Props, number, text

UNUSED: dict[str, Any] = {"path": Path("dump"), "notes": None, "meant": ImportSelection()}
DUMP = DelayedExchange(**UNUSED, vhost=b"/")
HEADERS = Props(headers=((b"x-delay", number("I", 5_000)), (b"tenant", text("acme"))), delivery_mode=2).encode()


def line(*fields: bytes, due_ms: int = 1_796_036_393_875) -> bytes:
    return b" ".join([b"%d" % due_ms, *map(base64.b64encode, fields)])


def test_other_output_of_rabbitmqctl() -> None:
    assert [DUMP.read(text) for text in (b"", b"ok", b"12")] == [None, None, 12]


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
        DUMP.read(text)


def test_names_outside_utf_8_are_parameters_too() -> None:
    dump = DelayedExchange(**UNUSED, vhost=b"\xff", exchanges={b"\xfe": Target(b"\xfd", b"")})
    assert dump.more_parameters() == {"vhost": "\\xff", "exchanges": {"\\xfe": ["\\xfd", ""]}}
