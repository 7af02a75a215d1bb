"""The faults that an audit finds, and the next step for each. Pure. If a finding's subject names a fault, the subject
ends with the fault's text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

FEWER: Final = "fewer rows than the counters say"
MORE: Final = "more rows than the counters say"
PACKED_SUM: Final = "all segments: compacted - restored"

CHANGED: Final = "its bytes do not fit its digest: one of them has changed"
NEWER: Final = "its format is newer than this delayer"
UNREADABLE: Final = "it does not decode to the messages that it should have"
NUMBER: Final = "it has another number of ids than of messages"
DUE: Final = "its first and last due time are not those of its messages"
IDS: Final = "its ids are not those of its messages: a cancel would miss them"
SIZE: Final = "its messages have another size than it says"
LATE: Final = "it was not restored in time"
MARKED: Final = "a daemon could not restore it"

UNKNOWN_FORMAT: Final = "the format is not known"
CHECKSUM: Final = "the checksum does not fit its bytes"
PROPERTIES: Final = "the properties cannot be decoded"
PARTITION: Final = "it is due outside its partition"

OVERDUE: Final = "overdue"
PACED: Final = "paced"
"""Overdue rows of a route with ``max_rate``, counted separately because an operator limited their rate."""
UNTRIED: Final = "held, and not tried again in time"
UNKNOWN_LANE: Final = "not in the table of lanes"
UNOWNED: Final = "no owner, and messages are due"

ONE_ID: Final = "one id, more than one message"
SAME: Final = "the same message more than once"

COLLIDES: Final = "several waiting messages have one key"
UNREACHABLE: Final = "a waiting message that its key does not stand for"
DANGLES: Final = "a key that stands for no message"

PEAK: Final = "peak"

_FROM_BACKUP = (
    "Keep the segment. Put its row of `segment` back from a backup or a replica (`id`, `digest`, `packed`), and run "
    "`delayer restore --all`."
)
_HEADER = "The messages read back. Run `delayer restore --all`: they become rows again, and the wrong header is gone."

NEXT: Final[Mapping[str, str]] = {
    FEWER: (
        "Messages are missing. Change nothing in the store. Find who changed rows besides delayer (psql, a part "
        "of a backup, replication), and take the rows from a backup. Correct `counter` only when you know the "
        "cause."
    ),
    MORE: (
        "No message is missing. Find who added rows, or restored `counter` from an older backup, besides delayer."
        " Correct `counter` when you know the cause."
    ),
    PACKED_SUM: (
        "Find who changed `segment` or `counter` besides delayer. Segments that are gone come back from a backup."
    ),
    CHANGED: f"{_FROM_BACKUP} Check disks and memory: the bytes were right when they were written.",
    NEWER: "Nothing is damaged. Install the newest delayer that compacted this store, for daemons and commands.",
    UNREADABLE: f"{_FROM_BACKUP} If the backup has the same bytes, report the segment with its id.",
    NUMBER: _FROM_BACKUP,
    DUE: _HEADER,
    IDS: _HEADER,
    SIZE: _HEADER,
    LATE: (
        "Start a daemon that has `delayer[segments]`, and look for `restoring interrupted` in its log. `delayer "
        "restore --within 1d` restores the segments at once."
    ),
    MARKED: (
        "Read the reason in the daemon's log (`segment broken`). Repair the disk or the memory, and run `delayer "
        "restore --all`: it tries the segment again."
    ),
    UNKNOWN_FORMAT: "Nothing is damaged. A newer delayer parked the message: upgrade every daemon to its version.",
    CHECKSUM: (
        "Check the disks, and the checksums of Postgres (`pg_amcheck`). The bytes come back only from a backup or"
        " a replica: a daemon holds such a message and never sends it. `delayer held drop` removes it."
    ),
    PROPERTIES: (
        "Check the disks, and the checksums of Postgres (`pg_amcheck`). If the checksum fits, the message came "
        "so. A daemon holds it and never sends it: read it with `delayer show`, and cancel it."
    ),
    PARTITION: (
        "Find who made or attached this partition. Move its rows: detach the partition, and insert its rows into "
        "`message` again."
    ),
    OVERDUE: (
        "See `delayer status` and the daemon's log: does a daemon run, does it reach the broker, does the broker "
        "block publishers? After an outage this drains by itself."
    ),
    PACED: "Nothing, if the rate is meant: it takes the number of messages divided by `max_rate`. Otherwise raise it.",
    UNTRIED: "See `delayer held list` and the daemon's log. `delayer held retry` tries them at once.",
    UNKNOWN_LANE: "No daemon takes this lane. Run `delayer db lanes N` with a number that includes it.",
    UNOWNED: "Start a daemon on this store, if none runs. A running daemon takes the lane within seconds.",
    ONE_ID: (
        "Change nothing in the store, and report it: delayer never gives an id twice. Was a backup restored in part?"
    ),
    SAME: (
        "A few are expected after a crash or a cut connection. Many of them, or without a fault, are a publisher "
        "that sends twice. `delayer cancel ID` removes one."
    ),
    COLLIDES: "All of them are delivered. Cancel the surplus ones by their ids, and report this.",
    UNREACHABLE: "It is delivered like any other. Cancel it by its id if the key should cancel it, and report this.",
    DANGLES: "No message is concerned. Report this, with the details.",
    PEAK: "If the time to drain is too long, spread the due times where they are made, or add daemons.",
    "missing": (
        "Declare the exchange or the queue before the first of them is due, or cancel the messages. Held ones are"
        " tried again by themselves, or at once by `delayer held retry`."
    ),
    "unroutable": (
        "Bind a queue to the exchange with this key before the first of them is due, or cancel the messages. Held"
        " ones are tried again by themselves, or at once by `delayer held retry`."
    ),
    "closed": "The exchange is internal, so nobody may publish to it. Declare another one, or cancel the messages.",
    "alternate": "Only the alternate exchange takes them. Bind a queue with this key, unless that is meant.",
}
"""By fault; for destinations, by the broker's verdict (broker.route_check.Verdict)."""
