"""Declarations: which arguments a queue may have, and which differ from those of the queue that exists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tests.simulation.broker.wire import Code, Refusal
from tests.support.raw import Value

TYPE_NAMES: Final = {
    b"S": "longstr", b"I": "signedint", b"i": "unsignedint", b"l": "long", b"s": "short", b"u": "unsignedshort",
    b"b": "byte", b"B": "unsignedbyte", b"t": "bool", b"T": "timestamp", b"F": "table", b"A": "array", b"d": "double",
    b"f": "float", b"V": "void", b"x": "binary", b"D": "decimal",
}  # fmt: skip
_SIGNED: Final = b"Ilsb"
_INTEGERS: Final = b"IilsubBT"
_COUNTS: Final = (
    "x-message-ttl", "x-expires", "x-max-length", "x-max-length-bytes", "x-max-priority",
    "x-max-in-memory-length", "x-max-in-memory-bytes", "x-quorum-initial-group-size",
)  # fmt: skip
_TEXTS: Final = ("x-dead-letter-exchange", "x-dead-letter-routing-key", "x-overflow", "x-queue-mode", "x-queue-type",
                 "x-dead-letter-strategy", "x-queue-master-locator", "x-queue-leader-locator")  # fmt: skip
_KINDS: Final = ("classic", "quorum", "stream")
_ONE_ACTIVE: Final = "x-single-active-consumer"
_FIXED: Final = ("x-expires", "x-message-ttl", "x-dead-letter-exchange", "x-dead-letter-routing-key", "x-max-length",
                 "x-max-length-bytes", "x-max-priority", "x-overflow", "x-queue-mode", "x-single-active-consumer",
                 "x-queue-type", "x-dead-letter-strategy", "x-delivery-limit")  # fmt: skip
"""The arguments that a second declaration must repeat."""
NOT_QUORUM: Final = ("x-max-priority", "x-queue-mode")


def plain(value: Value) -> object:
    """The value in Python, for comparisons and texts: an integer, a bool, or a text."""
    if value.kind in _INTEGERS:
        return int.from_bytes(value.raw, "big", signed=value.kind in _SIGNED)
    if value.kind == b"t":
        return value.raw == b"\1"
    return value.raw[4:].decode("utf-8", "replace") if value.kind in (b"S", b"x") else value.raw


def check_arguments(where: str, arguments: Mapping[str, Value]) -> None:
    """Raises Refusal for an argument that no queue can have."""
    for name, value in arguments.items():
        if name == "x-dead-letter-exchange" and value.kind != b"S":
            kind = TYPE_NAMES.get(value.kind, "?")
            raise Refusal(Code.PRECONDITION_FAILED, f"invalid type '{kind}' for arg '{name}' in {where}")
        if reason := _reason_against(name, value):
            raise Refusal(Code.PRECONDITION_FAILED, f"invalid arg '{name}' for {where}: {reason}")
    if "x-dead-letter-routing-key" in arguments and "x-dead-letter-exchange" not in arguments:
        text = "invalid arg 'x-dead-letter-routing-key' for " + where + ": routing_key_but_no_dlx_defined"
        raise Refusal(Code.PRECONDITION_FAILED, text)


def _reason_against(name: str, value: Value) -> str:
    expected = _INTEGERS if name in _COUNTS else b"S" if name in _TEXTS else b"t" if name == _ONE_ACTIVE else value.kind
    if value.kind not in expected:
        kind = TYPE_NAMES.get(value.kind, "?")
        return f'"expected integer, got {kind}"' if name in _COUNTS else f"{{unacceptable_type,{kind}}}"
    found = plain(value)
    if name in _COUNTS and isinstance(found, int) and found < 0:
        return f"{{value_negative,{found}}}"
    if name == "x-expires" and not found:
        return "{value_zero,0}"
    return f"\"unsupported queue type '{found}'\"" if name == "x-queue-type" and found not in _KINDS else ""


def check_flags(where: str, found: Mapping[str, bool], received: Mapping[str, bool]) -> None:
    for name, value in received.items():
        if found[name] != value:
            text = f"received '{str(value).lower()}' but current is '{str(found[name]).lower()}'"
            raise Refusal(Code.PRECONDITION_FAILED, f"inequivalent arg '{name}' for {where}: {text}")


def check_same(where: str, found: Mapping[str, Value], received: Mapping[str, Value], names: tuple[str, ...]) -> None:
    """Raises Refusal for the first argument that differs. The integer's type does not matter."""
    for name in names:
        one, other = found.get(name), received.get(name)
        if (None if one is None else plain(one)) != (None if other is None else plain(other)):
            both = one is not None and other is not None
            text = f"received {_described(other, both)} but current is {_described(one, both)}"
            raise Refusal(Code.PRECONDITION_FAILED, f"inequivalent arg '{name}' for {where}: {text}")


def check_same_queue(where: str, found: Mapping[str, Value], received: Mapping[str, Value]) -> None:
    check_same(where, found, received, _FIXED)


def _described(value: Value | None, short: bool) -> str:
    if value is None:
        return "none"
    found = plain(value)
    shown = str(found).lower() if isinstance(found, bool) else found
    return f"'{shown}'" if short else f"the value '{shown}' of type '{TYPE_NAMES.get(value.kind, '?')}'"
