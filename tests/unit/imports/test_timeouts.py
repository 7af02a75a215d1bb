"""A stored timeout becomes the message that NServiceBus's transport would have published."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime

import pytest

from delayer.amqp.properties import Properties
from delayer.core.importing import ImportSelection, Rewrite, read_rewrite
from delayer.core.units import LATEST_MS
from delayer.imports.timeouts import RELATED, UNREAD, StoredTimeout, epoch_ms, item_of, misnamed, moment_of
from tests.support.raw import wire_instant

DUE_MS = 1_900_000_000_000
HEADERS = {
    "NServiceBus.MessageId": "4711",
    "NServiceBus.CorrelationId": "c-1",
    "NServiceBus.ReplyToAddress": "sales@HOST",
    "NServiceBus.ContentType": "text/xml",
    "NServiceBus.EnclosedMessageTypes": "Shop.Remind, Shop, Version=1.0.0.0;Shop.IRemind, Shop",
    "NServiceBus.Timeout.RouteExpiredTimeoutTo": "sales",
    "ümlaut": "☃",
}


def made(headers: object = HEADERS, rewrites: Sequence[Rewrite] = (), **more: object) -> tuple[Properties, str]:
    given = headers if headers is None or isinstance(headers, str) else json.dumps(headers)
    values = {"id": "id-1", "address": "sales", "due_ms": DUE_MS, "headers": given, "body": b"\0body"} | more
    item = item_of(StoredTimeout(**values), b"nservicebus-sql", ImportSelection(rewrites=rewrites))  # type: ignore[arg-type]
    return Properties.parse(item.parcel.properties), "" if item.hold is None else item.hold.text


def test_properties_and_headers() -> None:
    properties, problem = made()
    assert problem == ""
    assert {name: properties.short(name) for name in ("content_type", "correlation_id", "reply_to", "type")} == {
        "content_type": b"text/xml",
        "correlation_id": b"c-1",
        "reply_to": b"sales@HOST",
        "type": b"Shop.Remind",
    }
    assert (
        properties.short("message_id"),
        properties.raw[properties.spans["delivery_mode"][0]],
        properties.short("expiration"),
    ) == (b"4711", 2, None)
    assert {one.name.decode(): one.value for one in properties.headers_items()} == {**HEADERS, RELATED: "id-1"}
    assert {chr(one.type) for one in properties.headers_items()} == {"S"}


def test_the_reply_address_is_the_saved_one() -> None:
    """Timeout managers of core 3 to 5 saved it in their own header, and replaced it with their own address."""
    saved = {"NServiceBus.Timeout.ReplyToAddress": "shop@HOST", "NServiceBus.ReplyToAddress": "sales.Timeouts@HOST"}
    for headers in (saved, {name: saved[name] for name in list(saved)[:1]}):
        properties, _ = made(headers)
        said = {one.name.decode(): one.value for one in properties.headers_items()}
        assert said == {"NServiceBus.ReplyToAddress": "shop@HOST", RELATED: "id-1"}
        assert properties.short("reply_to") == b"shop@HOST"
    assert made({"NServiceBus.Timeout.ReplyToAddress": ""})[0].short("reply_to") is None


def test_the_reply_address_is_renamed_with_the_destination() -> None:
    properties, _ = made(rewrites=[read_rewrite("s/@.*//"), read_rewrite("s/^/new./")])
    assert properties.short("reply_to") == b"new.sales"
    assert properties.get(b"NServiceBus.ReplyToAddress").value == "new.sales"  # type: ignore[union-attr]
    assert made({}, rewrites=[read_rewrite("s/^/new./")])[0].short("reply_to") is None


@pytest.mark.parametrize("headers", [None, "", "null", "{}", "[]"])
def test_without_headers_its_own_id_is_the_message_id(headers: str | None) -> None:
    properties, problem = made(headers)
    assert problem == ""
    assert [one.name.decode() for one in properties.headers_items()] == [RELATED]
    assert properties.short("message_id") == b"id-1"


def test_both_dictionary_forms_of_dotnet_are_read() -> None:
    pairs = [{"Key": name, "Value": value} for name, value in HEADERS.items()]
    assert made(pairs)[0].raw == made(HEADERS)[0].raw
    typed = {"$type": "System.Collections.Generic.Dictionary`2[[System.String],[System.String]], mscorlib", **HEADERS}
    assert made(typed)[0].raw == made(HEADERS)[0].raw


def test_other_values_become_text_and_surrogates_are_no_problem() -> None:
    properties, problem = made('{"n": 1, "null": null, "t": true, "o": {"a": [1]}, "s": "\\ud800"}')
    found = {one.name: one.content for one in properties.headers_items()}
    assert (found[b"n"], found[b"null"], found[b"t"], found[b"o"]) == (b"1", b"", b"true", b'{"a": [1]}')
    assert problem == ""


@pytest.mark.words
@pytest.mark.parametrize(
    "headers", ["{", "7", '"text"', json.dumps({"n" * 256: "x"}), '{"a": ', '[{"Key": "a"}]', "[7]"]
)
def test_unreadable_headers_are_kept_as_they_are(headers: str) -> None:
    properties, problem = made(headers)
    assert problem.startswith("unfit: its headers cannot be read")
    raw = properties.get(UNREAD)
    assert raw is not None
    assert raw.content == headers.encode()


def test_long_values_are_headers_only() -> None:
    properties, problem = made({"NServiceBus.CorrelationId": "x" * 256})
    assert (properties.short("correlation_id"), problem) == (None, "")


@pytest.mark.words
@pytest.mark.parametrize("address", ["", "a" * 256])
def test_an_invalid_destination_is_a_problem(address: str) -> None:
    hold = misnamed(address.encode())
    assert hold is not None
    assert made(address=address)[1] == made("{", address=address)[1] == hold.text
    assert "its destination has" in hold.text


@pytest.mark.parametrize(
    ("expire", "later_ms"),
    [*((wire_instant(DUE_MS + ms), ms if 0 < ms <= 1_000 else 0) for ms in (-1, 499, 1_000, 1_001)), ("tomorrow", 0)],
)
def test_a_rounded_instant_is_exact_in_the_header(expire: str, later_ms: int) -> None:
    headers = json.dumps({"NServiceBus.Timeout.Expire": expire})
    item = item_of(StoredTimeout("1", "q", DUE_MS, headers, b""), b"", ImportSelection())
    assert item.parcel.due_ms == DUE_MS + later_ms


@pytest.mark.parametrize(("due_ms", "expected"), [(-5, 0), (LATEST_MS, LATEST_MS), (LATEST_MS + 1, LATEST_MS)])
def test_due_instants_are_limited_to_the_valid_range(due_ms: int, expected: int) -> None:
    assert item_of(StoredTimeout("1", "q", due_ms, None, b""), b"", ImportSelection()).parcel.due_ms == expected


def test_instants_round_up() -> None:
    assert epoch_ms(datetime(1970, 1, 1, 0, 0, 1, 1)) == 1_001  # noqa: DTZ001
    assert epoch_ms(datetime(1970, 1, 1, 0, 0, 1)) == 1_000  # noqa: DTZ001
    assert epoch_ms(moment_of(DUE_MS)) == DUE_MS
