"""The two crash tables of the design, section 7, as values."""

from __future__ import annotations

from collections.abc import Mapping

from tests.faults.scenes import (
    BROKER,
    BROKER_CUT,
    DAEMON,
    ONCE,
    PERHAPS_TWICE,
    POSTGRES,
    STORE_CUT,
    TWICE,
    Copies,
    Row,
)


def copies(
    daemon: Copies, broker: Copies, postgres: Copies, broker_cut: Copies, store_cut: Copies
) -> dict[str, Copies]:
    return {DAEMON: daemon, BROKER: broker, POSTGRES: postgres, BROKER_CUT: broker_cut, STORE_CUT: store_cut}


def native(daemon: Copies, broker: Copies, broker_cut: Copies) -> dict[str, Copies]:
    return {DAEMON: daemon, BROKER: broker, BROKER_CUT: broker_cut}


# A daemon that goes on after its connections are gone may publish over new ones what it had read over the old ones;
# then the broker delivers it again: so "once" needs the daemon dead, or an acknowledgement that arrived.
NATIVE: Mapping[str, Row] = {
    "reading it": Row(
        "native", "intake.read", native(ONCE, PERHAPS_TWICE, PERHAPS_TWICE), {"delays": 1, "out": 0}, absolute=False
    ),
    "the publish": Row("native", "publish.written", native(PERHAPS_TWICE, PERHAPS_TWICE, PERHAPS_TWICE), {"delays": 1}),
    "the confirm": Row(
        "native", "intake.confirmed", native(TWICE, TWICE, TWICE), {"delays": 1, "out": 0}, delay_ms=5_000
    ),
    # The acknowledgement is handed to the transport at this point, not sent. With a prefetch of 1 the second message
    # is there only because the first one's has arrived.
    "the ack": Row(
        "native",
        "intake.acked:2",
        native(PERHAPS_TWICE, PERHAPS_TWICE, PERHAPS_TWICE),
        {"out": 0},
        messages=2,
        prefetch=1,
        delay_ms=5_000,
    ),
    # The same four at the other end of the cascade, between the due queue and the destination.
    "reading it when due": Row(
        "native",
        "intake.read:2",
        native(ONCE, PERHAPS_TWICE, PERHAPS_TWICE),
        {"delays": 0, "delays.due": 1, "out": 0},
        same_id=True,
    ),
    "the publish when due": Row(
        "native",
        "publish.written:2",
        native(PERHAPS_TWICE, PERHAPS_TWICE, PERHAPS_TWICE),
        {"delays": 0, "delays.due": 1},
        same_id=True,
    ),
    "the confirm when due": Row(
        "native",
        "intake.confirmed:2",
        native(TWICE, TWICE, TWICE),
        {"delays": 0, "delays.due": 1, "out": 1},
        same_id=True,
    ),
    "the ack when due": Row(
        "native",
        "intake.acked:4",
        native(PERHAPS_TWICE, PERHAPS_TWICE, PERHAPS_TWICE),
        {"delays": 0, "out": 2},
        same_id=True,
        messages=2,
        prefetch=1,
    ),
}

STORE: Mapping[str, Row] = {
    "COPY": Row(
        "store",
        "park.copied",
        copies(ONCE, PERHAPS_TWICE, ONCE, TWICE, ONCE),
        {"delays": 1, "store": 0, "out": 0},
        absolute=False,
    ),
    "commit": Row(
        "store",
        "park.committed",
        copies(TWICE, TWICE, ONCE, TWICE, ONCE),
        {"delays": 1, "store": 1, "out": 0},
        delay_ms=5_000,
    ),
    "claim": Row(
        "store",
        "release.claimed",
        copies(ONCE, PERHAPS_TWICE, TWICE, ONCE, TWICE),
        {"delays": 0, "store": 1, "out": 0},
        same_id=True,
    ),
    "publish": Row(
        "store",
        "publish.written",
        copies(PERHAPS_TWICE, PERHAPS_TWICE, PERHAPS_TWICE, PERHAPS_TWICE, PERHAPS_TWICE),
        {"delays": 0, "store": 1},
        same_id=True,
    ),
    "publish, confirmed": Row(
        "store",
        "release.published",
        copies(TWICE, PERHAPS_TWICE, TWICE, ONCE, TWICE),
        {"delays": 0, "store": 1, "out": 1},
        same_id=True,
    ),
    "commit of the release": Row(
        "store",
        "release.committed",
        copies(ONCE, ONCE, ONCE, ONCE, ONCE),
        {"delays": 0, "store": 0, "out": 1},
    ),
}


def restoring(copies: Copies) -> dict[str, Copies]:
    return {DAEMON: copies, POSTGRES: copies, STORE_CUT: copies}


def restore(fault: str, rows: int, packed: int) -> Row:
    """``rows`` and ``packed``: how many of the messages wait, and are in the segment, when the daemon is dead."""
    after = {"delays": 0, "store": rows, "segments": packed, "out": 0}
    return Row(
        "store", fault, restoring(ONCE), after, same_id=True, delay_ms=5_000, messages=PACKED, prepared="compacted"
    )


PACKED = 20
# Beside the design's tables: the process dies in the middle of restoring a segment. Nothing of it was ever published,
# so nothing comes twice, whoever dies.
RESTORE: Mapping[str, Row] = {
    "lock of the segment": restore("restore.locked", 0, PACKED),
    "copy of its rows": restore("restore.copied", 0, PACKED),
    "deletion of the segment": restore("restore.deleted", 0, PACKED),
    "commit of the restore": restore("restore.committed", PACKED, 0),
}
