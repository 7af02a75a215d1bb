"""Integrity: what can be wrong with one message's row. Pure."""

from __future__ import annotations

from delayer.audit.rules.message import WAITING, Context, Message
from delayer.store.envelope import FORMAT
from delayer.wire.properties import MalformedProperties, MalformedTable, Properties

CHECKSUM = "the checksum does not fit its bytes"
UNKNOWN_FORMAT = "the format is not known"
PROPERTIES = "the properties cannot be decoded"
PARTITION = "it is due outside its partition"


def parsed(message: Message) -> Properties | None:
    """Its properties, the table of headers looked through; None if they cannot be decoded, or were never meant to be:
    what a row of an unknown format means is not known either."""
    if not known(message):
        return None
    try:
        properties = Properties.parse(message.properties)
        properties.entries()
    except (MalformedProperties, MalformedTable):
        return None
    return properties


def known(message: Message) -> bool:
    return 1 <= message.format <= FORMAT


def faults(message: Message, properties: Properties | None, context: Context) -> tuple[str, ...]:
    """What is wrong with the message; ``properties`` is what :func:`parsed` made of it. Nearly always empty."""
    found: tuple[str, ...] = ()
    if not known(message):
        found = (UNKNOWN_FORMAT,)
    else:
        if message.crc != message.checksum:
            found = (CHECKSUM,)
        if properties is None:
            found = (*found, PROPERTIES)
    if misplaced(message, context):
        found = (*found, PARTITION)
    return found


def misplaced(message: Message, context: Context) -> bool:
    """Is it due at a time that its partition does not have? Claims look for it by that."""
    if message.where != WAITING or not message.home:
        return False
    interval = context.partitions.get(message.home)
    if interval is not None:
        return not interval[0] <= message.due_ms < interval[1]
    # The default partition: it has every time that no other has.
    return context.has_partition(message.due_ms)
