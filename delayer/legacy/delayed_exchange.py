"""Source `delayed-exchange`: what RabbitMQ's delayed-message plugin still holds, from a dump of its tables.

The dump is made on each node of the broker by one `rabbitmqctl eval` (docs/importing.md) and changes nothing there. A
line is a message, fields between blanks: the due instant in epoch milliseconds, then base64 of virtual host, exchange,
routing keys with NUL between them, property bytes, and body. The last line says how many there are.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from delayer.core.importing import Item, Meant, Rewrite, Survey
from delayer.core.message import Parcel, Target
from delayer.legacy.files import FileSource, Reading, Skipped, Unreadable
from delayer.legacy.ports import ImportImpossible
from delayer.wire.fields import entry, long_string
from delayer.wire.properties import MalformedProperties, MalformedTable, Properties, splice

NAME: Final = "delayed-exchange"
FIELDS: Final = 6
LONGEST_NAME: Final = 255
_NOTHING: Final = (b"", b"ok")


@dataclass(frozen=True, slots=True)
class Plan:
    """What of a dump is meant, and where it goes: messages of ``vhost``; those of an exchange in ``exchanges`` to the
    target there (an empty key keeps the message's own), those of any other to the exchange of the same name."""

    vhost: bytes
    exchanges: Mapping[bytes, Target] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        to = {
            _text(name): [_text(target.exchange), _text(target.routing_key)] for name, target in self.exchanges.items()
        }
        return {"vhost": _text(self.vhost), "exchanges": to}

    def target(self, exchange: bytes, routing_key: bytes) -> Target:
        found = self.exchanges.get(exchange)
        return (
            Target(exchange, routing_key) if found is None else Target(found.exchange, found.routing_key or routing_key)
        )


def _text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")


def read(line: bytes, plan: Plan) -> Item | Skipped | int | None:
    """The message of a line; the number that the last one says; None for one that says nothing. Raises Unreadable."""
    if line.strip() in _NOTHING:
        return None
    if line.strip().isdigit():
        return int(line)
    fields = line.split(b" ")
    if len(fields) != FIELDS:
        raise Unreadable(f"expected {FIELDS} fields between blanks, found {len(fields)}")
    if not fields[0].isdigit():
        raise Unreadable("expected the due instant in milliseconds in the first field")
    try:
        vhost, exchange, keys, properties, body = (base64.b64decode(text, validate=True) for text in fields[1:])
    except (binascii.Error, ValueError):
        raise Unreadable("expected base64 behind the first field") from None
    if vhost != plan.vhost:
        return Skipped(f"of virtual host {_text(vhost)!r}")
    routing_keys = keys.split(b"\0")
    if max(map(len, (exchange, *routing_keys))) > LONGEST_NAME:
        raise Unreadable(f"expected names of at most {LONGEST_NAME} bytes")
    try:
        properties = _with_blind_copies(properties, routing_keys[1:])
    except (MalformedProperties, MalformedTable) as error:
        raise Unreadable(f"the property bytes are broken: {error}") from error
    target = plan.target(exchange, routing_keys[0])
    return Item(Parcel(int(fields[0]), exchange, exchange, routing_keys[0], target, properties, body))


def _with_blind_copies(properties: bytes, more_keys: Sequence[bytes]) -> bytes:
    """A message has more keys than one by its headers CC and BCC. The broker took the second away when it came in."""
    found = Properties.parse(properties)
    field_of_copies = found.get(b"CC")
    told = field_of_copies.value if field_of_copies is not None else []
    copies = {one.encode() if isinstance(one, str) else one for one in told} if isinstance(told, list) else set()
    blind = [key for key in more_keys if key not in copies]
    if not blind:
        return properties
    content = b"".join(map(long_string, blind))
    return splice(found, append=entry(b"BCC", b"A" + len(content).to_bytes(4, "big") + content))


class DelayedExchange(FileSource):
    """The dump; several of several nodes may be put one behind the other."""

    def __init__(self, path: Path, plan: Plan, meant: Meant, rewrites: Sequence[Rewrite] = ()) -> None:
        super().__init__(NAME, path, meant, rewrites, plan.as_dict())
        self._plan = plan
        self._ends: list[int] = []

    def read(self, line: bytes) -> Reading:
        """See FileSource."""
        found = read(line, self._plan)
        if isinstance(found, int):
            self._ends.append(found)
            return None
        return found

    def look(self) -> Survey:
        """See FileSource. Raises ImportImpossible for a dump that was cut."""
        self._ends.clear()
        survey = super().look()
        found = (survey.messages or 0) + sum(survey.left.values())
        if not self._ends:
            survey.doubt("the dump does not say how many messages it has: whether it was cut is not known")
        elif sum(self._ends) != found:
            raise ImportImpossible(
                f"{self.path}: expected {sum(self._ends)} messages by its last line, found {found}: it was cut"
            )
        return survey
