"""Imports: rewritten destinations, and the lines of a file."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayer.cli.output import print_json
from delayer.core.hold import Hold, HoldKind
from delayer.core.importing import ImportItem, ImportSelection, read_rewrite
from delayer.core.message import Parcel, Target
from delayer.core.readable import escaped
from delayer.format import lines
from delayer.format.lines import EndLine, Line, NotALine
from tests.support.fakes import due


def parcel(exchange: bytes = b"", routing_key: bytes = b"sales", body: bytes = b"body") -> Parcel:
    return due(1).parcel._replace(target=Target(exchange, routing_key), body=body)


@pytest.mark.parametrize(
    ("expression", "name", "expected"),
    [
        ("s/@.*//", "sales@SERVER7", "sales"),
        ("s/@.*//", "sales", "sales"),
        ("s/@.*//", "a@b@c", "a"),
        ("s/a/b/", "aaa", "baa"),
        ("s/(?i)A/b/", "aAa", "bAa"),
        ("s|/|.|", "a/b/c", "a.b/c"),
        (r"s/^(.*)@(.*)$/\2.\1/", "sales@SERVER7", "SERVER7.sales"),
        (r"s/.*/prod.\g<0>/", "sales", "prod.sales"),
        (r"s/a/\\/", "a", "\\"),
        ("s,@.*,,", "sales@x", "sales"),
        ("s/ö/oe/", "Mörder", "Moerder"),
    ],
)
def test_rewriting(expression: str, name: str, expected: str) -> None:
    assert read_rewrite(expression)(name) == expected


@pytest.mark.parametrize(
    "text", ["", "s", "s/a/b", "s/a", "y/a/b/", "s/a/b/g", "s/(/b/", r"s/a/\1/", "saabba", "s/a/b/c/d", "@.*"]
)
def test_invalid_rewrites(text: str) -> None:
    with pytest.raises(ValueError, match="an expression such as"):
        read_rewrite(text)


def test_the_queue_is_renamed_or_the_exchange() -> None:
    chosen = ImportSelection(rewrites=[read_rewrite("s/@.*//"), read_rewrite("s/^/x./")])
    assert chosen.redirected(ImportItem(parcel(b"", b"q@m"))).parcel.target == (b"", b"x.q")
    assert chosen.redirected(ImportItem(parcel(b"e@m", b"q@m"))).parcel.target == (b"x.e", b"q@m")
    assert chosen.retargeted(Target(b"", b"\xff@x")) == (b"", b"x.\xff"), "bytes outside UTF-8 are kept"


def random_parcel(chance: random.Random) -> Parcel:
    def some(longest: int) -> bytes:
        return chance.choice([b"", b"orders.eu", "naïve ☃".encode(), chance.randbytes(chance.randrange(longest))])

    return Parcel(
        chance.randrange(1 << 41), some(255), some(255), some(255), Target(some(255), some(255)),
        chance.randbytes(chance.randrange(2, 300)), some(5_000), chance.choice([None, some(255)]),
        since_ms=chance.choice([None, chance.randrange(1 << 41)]),
    )  # fmt: skip


def test_lines_are_exact_to_the_byte() -> None:
    chance = random.Random(6)
    held = Hold(HoldKind.LATE, "why\n", isolated=True)
    for _ in range(500):
        line = Line(random_parcel(chance), chance.choice([None, chance.getrandbits(32)]), chance.choice([None, held]))
        if line.held is not None:
            line = line._replace(parcel=line.parcel._replace(token=chance.choice([b"", b"30a6aca3", b"\xff"])))
        written = lines.format_line(line)
        assert written.count(b"\n") == 1
        assert lines.parse_line(written) == line


def test_the_last_line_has_the_number_of_messages() -> None:
    assert lines.parse_line(lines.format_end_line(7)) == EndLine(7)


def test_fields_with_a_default_are_optional() -> None:
    found = lines.parse_line(b'{"v":1,"due_ms":5,"routing_key":"q","body":"x"}')
    assert found == Line(Parcel(5, b"", b"", b"q", Target(b"", b"q"), lines.PERSISTENT, b"x"))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "JSON object"),
        (b"{", "JSON object"),
        (b"[1]", "found list"),
        (b"[" * 100_000, "JSON object"),
        (b"\xff", "JSON object"),
        (b"{}", "version 1"),
        (b'{"v":2,"due_ms":1}', "version 1"),
        (b'{"v":1}', "due_ms: expected an integer, found nothing"),
        (b'{"v":1,"due_ms":1.5}', "found float"),
        (b'{"v":1,"due_ms":true}', "found bool"),
        (b'{"v":1,"due_ms":"1"}', "found str"),
        (b'{"v":1,"due_ms":1,"body":1}', "body: expected a string"),
        (b'{"v":1,"due_ms":1,"body_b64":"*"}', "body_b64: expected base64"),
        (b'{"v":1,"due_ms":1,"body_b64":7}', "body_b64: expected a string"),
        (b'{"v":1,"due_ms":1,"body":"\\ud800"}', "body: expected characters; put other bytes into body_b64"),
        (b'{"v":1,"due_ms":1,"held":1}', "held: expected an object"),
        (b'{"v":1,"due_ms":1,"held":{"kind":"why"}}', "held.kind: expected one of returned, "),
        (b'{"v":1,"due_ms":1,"held":{"kind":"late","text":1}}', "held.text: expected a string"),
        (b'{"v":1,"due_ms":1,"held":{"kind":"late","isolated":1}}', "held: expected true or false"),
        (b'{"v":1,"due_ms":1,"held":{"kind":"late","why":1}}', "expected a known field, found 'why'"),
        (b'{"v":1,"due_ms":1,"crc":"x"}', "crc: expected an integer"),
        (b'{"v":1,"due_ms":1,"to_key":"' + b"k" * 256 + b'"}', "to_key: expected at most 255 bytes, found 256"),
        (b'{"v":1,"due_ms":1,"token":"x"}', "token: expected beside held"),
        (b'{"v":1,"due_ms":1,"held":{"kind":"late"},"token":1}', "token: expected a string"),
        (b'{"v":1,"messages":"x"}', "messages: expected an integer"),
        (b'{"v":1,"due_ms":1,"boddy":"x"}', r"expected a known field, found 'boddy' \(did you mean body\?\)"),
        (
            b'{"v":1,"due_ms":1,"body":"x","remark":"mine"}',
            r"found 'remark' \(known: body, body_b64, crc, due_ms, exchange, ",
        ),
        (b'{"v":1,"due_ms":1,"properties":"EAAC"}', r"'properties' \(did you mean properties_b64\?\)"),
        (b'{"v":1,"due_ms":1,"crc_b64":"AAAA"}', "found 'crc_b64'"),
        (b'{"v":1,"due_ms":1,"messages":1}', "found 'messages'"),
        (b'{"v":1,"messages":1,"body":"x"}', r"found 'body' \(known: messages, v\)"),
        (b'{"v":1,"due_ms":1,"body_b64":"eA==","body":"x"}', "expected body or body_b64, found both"),
    ],
)
def test_invalid_lines(text: bytes, why: str) -> None:
    with pytest.raises(NotALine, match=why):
        lines.parse_line(text)


@pytest.mark.words
def test_bytes_of_the_first_version() -> None:
    """Never change these: files of this version may be kept for years."""
    kept = (
        b'{"v":1,"due_ms":1795604393876,"route":"mail.in","exchange":"mail.in","routing_key":"outbox",'
        b'"to_exchange":"mail.out","to_key_b64":"/w==","key":"order-7","body":"hell\xc3\xb6",'
        b'"properties_b64":"EAAC","since_ms":1795604093876,"crc":3735928559,'
        b'"held":{"kind":"returned","text":"returned: 312 NO_ROUTE",'
        b'"may_be_delivered":true,"isolated":false}}\n'
    )
    target = Target(b"mail.out", b"\xff")
    of = Parcel(1795604393876, b"mail.in", b"mail.in", b"outbox", target, b"\x10\0\2", "hellö".encode(), b"order-7")
    of = of._replace(since_ms=1795604093876)
    line = Line(of, 3735928559, Hold(HoldKind.RETURNED, "returned: 312 NO_ROUTE", may_be_delivered=True))
    assert lines.parse_line(kept) == line
    assert lines.format_line(line) == kept


# JSON that is safe on every terminal.


@pytest.mark.parametrize("character", ["\x7f", "\x9b", "\u202e", "\u2028", "\ud800", "\U000e0001", "\x1b"])
def test_invisible_characters_are_escaped(character: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"key": f"ä{character}☃"})
    shown = capsys.readouterr().out
    assert character not in shown
    assert "ä" in shown and "☃" in shown
    assert json.loads(shown) == {"key": f"ä{character}☃"}


@given(st.recursive(st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_escaped_json_has_the_same_value(value: object) -> None:
    plain = escaped(json.dumps(value, indent=2, ensure_ascii=False))
    assert json.loads(plain) == value
    assert all(one.isprintable() for one in plain.replace("\n", ""))
