"""Source `nservicebus-raven`: an export of RavenDB's `TimeoutDatas/` documents, one JSON object per line.

Each document has Destination, SagaId, State (base64), Time, OwningTimeoutManager and Headers. Its id is in "Id", in
"@metadata" (as "@id"), or in "Key". Documents of NServiceBus 5 and older have the destination as an object.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from delayer.core.delay_headers import read_utc_ms
from delayer.core.importing import given
from delayer.core.readable import parser_error
from delayer.imports.files import FileSource, LineReading, SkippedRecord, Unreadable
from delayer.imports.timeouts import StoredTimeout, item_of

COLLECTION: Final = "TimeoutDatas"
HIDDEN: Final = ("__hidden__", "__migrated__")
"""Owner-name prefixes with which the vendor's own migration marks timeouts as in progress and done."""


def _id(found: Mapping[str, Any], metadata: Mapping[str, Any]) -> str:
    for value in (found.get("Id"), metadata.get("@id"), found.get("@id"), found.get("Key")):
        if isinstance(value, str) and value:
            return value
    raise Unreadable("expected an id in Id, @metadata or Key")


def _address(said: object) -> str:
    if isinstance(said, dict):
        queue, machine = said.get("Queue"), said.get("Machine")
        if not isinstance(queue, str):
            raise Unreadable("Destination: expected a Queue in the object")
        return f"{queue}@{machine}" if machine else queue
    if not isinstance(said, str):
        raise Unreadable(f"Destination: expected a string or an object, found {type(said).__name__}")
    return said


def _due_ms(found: Mapping[str, Any]) -> int:
    said = found.get("Time")
    due_ms = read_utc_ms(said) if isinstance(said, str) else None  # Older documents omit the zone.
    if due_ms is None:
        raise Unreadable(f"Time: expected an instant such as 2031-01-31T08:00:00.0000000Z, found {said!r}")
    return due_ms


def _body(found: Mapping[str, Any]) -> bytes:
    said: Any = found.get("State")
    if said is None:
        return b""
    if isinstance(said, dict):
        said = said.get("$value")  # Json.NET writes bytes with their type in this form.
    try:
        return base64.b64decode(said, validate=True)
    except (TypeError, binascii.Error, ValueError):
        raise Unreadable("State: expected base64") from None


@dataclass(eq=False, repr=False, kw_only=True)
class RavenExport(FileSource):
    """An export. ``endpoint``: import only its timeouts."""

    name = "nservicebus-raven"
    counted = False
    endpoint: str | None = None

    def more_parameters(self) -> Mapping[str, object]:
        return given(endpoint=self.endpoint)

    def read(self, line: bytes) -> LineReading:
        if not line.strip():
            return None
        try:
            found = json.loads(line)
        except ValueError as error:
            raise Unreadable(f"expected a JSON object: {parser_error(error)}") from None
        except RecursionError:
            raise Unreadable("expected a JSON object: too many levels") from None
        if not isinstance(found, dict):
            raise Unreadable(f"expected a JSON object, found {type(found).__name__}")
        said = found.get("@metadata")
        metadata: Mapping[str, Any] = said if isinstance(said, dict) else {}
        collection = metadata.get("@collection") or metadata.get("Raven-Entity-Name") or COLLECTION
        if collection != COLLECTION:
            return SkippedRecord(f"of collection {collection!r}")
        owner = str(found.get("OwningTimeoutManager") or "")
        if owner.startswith(HIDDEN):
            return SkippedRecord("already taken by another migration")
        # Every timeout manager accepts a timeout without an owner.
        if self.endpoint is not None and owner not in ("", self.endpoint):
            return SkippedRecord("of other endpoints")
        address = _address(found.get("Destination"))
        timeout = StoredTimeout(_id(found, metadata), address, _due_ms(found), found.get("Headers"), _body(found))
        return item_of(timeout, self.name.encode(), self.meant)
