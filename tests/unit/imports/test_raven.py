"""RavenDB's timeout documents, in the shapes that NServiceBus wrote."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from delayer.amqp.properties import Properties
from delayer.core.importing import ImportSelection
from delayer.core.message import Target
from delayer.imports.files import LineReading, SkippedRecord, Unreadable
from delayer.imports.raven import RavenExport

DOCUMENT = {
    "Destination": "sales.orders",
    "SagaId": "00000000-0000-0000-0000-000000000000",
    "State": base64.b64encode(b"\0body").decode(),
    "Time": "2031-01-31T08:00:00.1234567Z",
    "OwningTimeoutManager": "Sales",
    "Headers": {"NServiceBus.MessageId": "4711"},
    "@metadata": {"@id": "TimeoutDatas/1", "@collection": "TimeoutDatas"},
}
DUE_MS = 1_927_612_800_124


def line(**more: object) -> bytes:
    return json.dumps({**DOCUMENT, **more}).encode()


def read(text: bytes, endpoint: str | None = None) -> LineReading:
    export = RavenExport(path=Path("unused"), notes=None, meant=ImportSelection(), endpoint=endpoint)  # type: ignore[arg-type]
    return export.read(text)


def test_a_document() -> None:
    item = read(line())
    parcel = item.parcel  # type: ignore[union-attr]
    assert (parcel.due_ms, parcel.target, parcel.body) == (DUE_MS, Target(b"", b"sales.orders"), b"\0body")
    assert Properties.parse(parcel.properties).short("message_id") == b"4711"
    assert item.hold is None  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("said", "address"),
    [
        ({"Queue": "sales", "Machine": "SERVER7"}, b"sales@SERVER7"),
        ({"Queue": "sales", "Machine": None}, b"sales"),
        ({"$type": "NServiceBus.Address, NServiceBus.Core", "Queue": "sales", "Machine": ""}, b"sales"),
        ("sales@SERVER7", b"sales@SERVER7"),
    ],
)
def test_both_shapes_of_a_destination(said: object, address: bytes) -> None:
    assert read(line(Destination=said)).parcel.target.routing_key == address  # type: ignore[union-attr]


@pytest.mark.parametrize("time", ["2031-01-31T08:00:00.1234567", "2031-01-31T09:00:00.1234567+01:00"])
def test_instants(time: str) -> None:
    assert read(line(Time=time)).parcel.due_ms == DUE_MS  # type: ignore[union-attr]


def test_places_of_the_id() -> None:
    for more in ({"Id": "x"}, {"@metadata": {"@id": "x"}}, {"Key": "x"}):
        text = json.dumps({**{k: v for k, v in DOCUMENT.items() if k != "@metadata"}, "Headers": {}, **more}).encode()
        assert Properties.parse(read(text).parcel.properties).short("message_id") == b"x"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("more", "endpoint", "why"),
    [
        ({"@metadata": {"@collection": "Sagas"}}, None, "of collection 'Sagas'"),
        ({"OwningTimeoutManager": "__hidden__Sales"}, None, "already taken by another migration"),
        ({"OwningTimeoutManager": "__migrated__Sales"}, None, "already taken by another migration"),
        ({}, "Mail", "of other endpoints"),
    ],
)
def test_some_documents_are_skipped(more: dict[str, object], endpoint: str | None, why: str) -> None:
    assert read(line(**more), endpoint) == SkippedRecord(why)


def test_unreadable_headers_are_kept() -> None:
    item = read(line(Headers=[1]))
    assert "headers cannot be read" in item.hold.text  # type: ignore[union-attr]


def test_a_timeout_without_an_owner_is_imported() -> None:
    assert not isinstance(read(line(OwningTimeoutManager=None), "Mail"), SkippedRecord)
    assert not isinstance(read(line(), "Sales"), SkippedRecord)
    assert read(b" ") is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"{", "JSON object"),
        (b"[]", "JSON object, found list"),
        (line(Destination=7), "Destination"),
        (line(Destination={"Machine": "x"}), "Queue"),
        (line(Time="tomorrow"), "Time"),
        (line(Time=None), "Time"),
        (line(Time="2031-02-31T08:00:00Z"), "Time"),
        (line(State="*"), "State"),
        (line(State=7), "State"),
        (json.dumps({k: v for k, v in DOCUMENT.items() if k != "@metadata"}).encode(), "an id"),
    ],
)
def test_lines_without_a_document(text: bytes, why: str) -> None:
    with pytest.raises(Unreadable, match=why):
        read(text)
