"""What the rules look at: the store of one instant, as Spark frames, and the columns of each.

Every frame lies in files by the time a rule sees it, so it may be read as often as a rule likes; all of them come from
one snapshot, so their figures fit each other. Instants are epoch milliseconds, as everywhere; bytes that AMQP carries
are binary.

Bodies are not in here. What a rule wants to know of one (its length, its digest, whether the row's checksum fits) is
worked out where the row is read, so that neither the JVM nor the disk of the job has to hold a copy of the backlog.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ROW, SEGMENT = "row", "segment"
"""Values of ``messages.origin``."""

_CONTENT: Final = (
    "id bigint, lane int, due_ms bigint, parked_ms bigint, checksum bigint, format int, route binary, exchange binary,"
    " routing_key binary, to_exchange binary, to_key binary, properties binary, key binary"
)
_OF_BODY: Final = "body_bytes bigint, crc bigint, body_digest binary"

OF_SEGMENTS: Final = (
    "id bigint, lane int, first_due_ms bigint, last_due_ms bigint, first_id bigint, last_id bigint,"
    " messages bigint, cancelled bigint, raw_bytes bigint, packed_bytes bigint, format int, made_ms bigint,"
    " broken_ms bigint, broken string"
)
"""What a segment says of itself."""
CAME_OUT: Final = (
    "unpacked bigint, live bigint, found_first_due_ms bigint, found_last_due_ms bigint, found_first_id bigint,"
    " found_last_id bigint, found_raw_bytes bigint, fault string"
)
"""What came out of it now."""
DAMAGE: Final = "damage string"
"""A column that only rows have which stand for a place that Postgres cannot read: rules.Damage as JSON."""

SCHEMAS: Final = {
    "messages": f"origin string, partition string, segment bigint, {_CONTENT}, {_OF_BODY}",
    "held": f"{_CONTENT}, {_OF_BODY}, held_ms bigint, retry_ms bigint, attempts int, reason string",
    "segments": f"{OF_SEGMENTS}, {CAME_OUT}",
    "tombstones": "segment bigint, id bigint",
    "keys": "key binary, lane int, due_ms bigint, id bigint",
    "lanes": "number int, epoch bigint, owner string, watermark_ms bigint, alive boolean",
    "counters": "lane int, kind string, n bigint",
    "partitions": "name string, first_ms bigint, after_ms bigint, bytes bigint",
    "damage": "relation string, place string, reason string",
}
"""Columns of each frame, as Spark's DDL. All of them can be null as far as Spark knows.

messages    every live waiting message, those in segments too (without the cancelled ones).
            ``origin``       "row" or "segment"
            ``partition``    the table that the row lies in; null from a segment
            ``segment``      the segment's id; null for a row
            ``lane``         from a segment: the segment's
            ``checksum``     as stored; ``crc`` is what the content's bytes give now (store.envelope.checksum)
            ``body_digest``  BLAKE2b of the body, 16 bytes
held        the same for messages that their destination would not take
segments    ``messages`` were packed and ``cancelled`` of these since; ``unpacked`` came out now, ``live`` without its
            tombstones, and ``found_…`` is what they are; ``fault`` says why it did not read back. ``broken`` is what a
            daemon wrote down about that
lanes       ``alive``: a daemon holds the lane's lock; null where that cannot be seen (on a replica)
partitions  the day that each partition has, as a half-open interval; both null for message_default
damage      places that Postgres cannot read (rules.Damage)
"""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of the snapshot as a whole.

    now_ms   the store's clock when it was taken; on a replica that is behind, the instant that it had come to
    sample   the share of the pages of ``message`` and of the segments that was read, 0 < sample <= 1. Below 1 nothing
             can be said about sums, keys that dangle and repeats
    replica  the server is one: the lanes' locks cannot be seen there
    """

    now_ms: int
    sample: float = 1.0
    replica: bool = False
    server: str = ""
    behind_ms: int = 0
    """How far a replica was behind its primary."""

    @property
    def whole(self) -> bool:
        return self.sample >= 1.0


@dataclass(frozen=True, slots=True)
class Frames:
    """The frames, each with the columns of :data:`SCHEMAS`, and what is known of the whole."""

    facts: Facts
    messages: DataFrame
    held: DataFrame
    segments: DataFrame
    tombstones: DataFrame
    keys: DataFrame
    lanes: DataFrame
    counters: DataFrame
    partitions: DataFrame
    damage: DataFrame
