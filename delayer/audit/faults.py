"""The faults that an audit finds, and the next step for each. Pure. If a finding's subject names a fault, the subject
ends with the fault's text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

FEWER: Final = "fewer rows than the counters say"
MORE: Final = "more rows than the counters say"
PACKED_SUM: Final = "all segments: compacted - restored"

CHANGED: Final = "its bytes do not match its digest: one of them has changed"
NEWER: Final = "its format is newer than this delayer"
UNREADABLE: Final = "it does not decode to the messages it should contain"
NUMBER: Final = "its number of ids differs from its number of messages"
DUE: Final = "its first and last due times differ from those of its messages"
IDS: Final = "its ids differ from those of its messages: a cancel would miss them"
SIZE: Final = "the size of its messages differs from its header"
LATE: Final = "it was not restored in time"
MARKED: Final = "a daemon could not restore it"

UNKNOWN_FORMAT: Final = "the format is unknown"
CHECKSUM: Final = "the checksum does not match its bytes"
PROPERTIES: Final = "the properties cannot be decoded"
PARTITION: Final = "it is due outside its partition"

OVERDUE: Final = "overdue"
PACED: Final = "paced"
"""Overdue rows of a route with ``max_rate``, counted separately because an operator limited their rate."""
UNTRIED: Final = "held, and not retried in time"
UNKNOWN_LANE: Final = "not in the table of lanes"
UNOWNED: Final = "no owner, and messages are due"

ONE_ID: Final = "one id, more than one message"
SAME: Final = "the same message more than once"

COLLIDES: Final = "several waiting messages have one key"
UNREACHABLE: Final = "a waiting message that its key does not point to"
DANGLES: Final = "a key that points to no message"

UNPLANNED: Final = "an active schedule without a waiting occurrence"
ASTRAY: Final = "a schedule whose key points to another message than its occurrence"
UNSCHEDULED: Final = "an occurrence that waits without an active schedule"

UNREAD: Final = "the SQL inbox: no daemon moves its messages"

PEAK: Final = "peak"

_FROM_BACKUP = (
    "Keep the segment. Restore its row of `segment` from a backup or a replica (`id`, `digest`, `packed`), and run "
    "`delayer restore --all`."
)
_CHECK_DISKS = "Check the disks, and the checksums of Postgres (`pg_amcheck`)."
_IN_TIME = (
    "before the first of them is due, or cancel the messages. Held messages are retried by themselves, or at once by "
    "`delayer held retry`."
)
_HEADER = "The messages are readable. Run `delayer restore --all`: they become rows again, without the wrong header."

NEXT: Final[Mapping[str, str]] = {
    FEWER: (
        "Messages are missing. Change nothing in the store. Find out what else changed rows (psql, a partial restore, "
        "replication), and restore the rows from a backup. Correct `counter` only once you know the cause."
    ),
    MORE: (
        "No message is missing. Find out what else added rows, or restored `counter` from an older backup. Correct "
        "`counter` once you know the cause."
    ),
    PACKED_SUM: "Find out what else changed `segment` or `counter`. Restore missing segments from a backup.",
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
        "Read the reason in the daemon's log (`segment broken`). Replace the faulty disk or memory, and run `delayer "
        "restore --all`, which retries the segment."
    ),
    UNKNOWN_FORMAT: "Nothing is damaged. A newer delayer parked the message: upgrade every daemon to its version.",
    CHECKSUM: (
        f"{_CHECK_DISKS} Only a backup or a replica has the right bytes. A daemon holds such a message and never sends "
        "it. `delayer held drop` removes it."
    ),
    PROPERTIES: (
        f"{_CHECK_DISKS} If the checksum matches, the message arrived like this. A daemon holds it and never sends it: "
        "read it with `delayer show`, and cancel it."
    ),
    PARTITION: "Find out who attached this partition. Detach it, and insert its rows into `message` again.",
    OVERDUE: (
        "See `delayer status` and the daemon's log: is a daemon running, does it reach the broker, does the broker "
        "block publishers? After an outage the backlog drains by itself."
    ),
    PACED: "Nothing, if the rate is intended: draining takes messages divided by `max_rate`. Otherwise raise it.",
    UNTRIED: "See `delayer held list` and the daemon's log. `delayer held retry` tries them at once.",
    UNKNOWN_LANE: "No daemon acquires this lane. Run `delayer db lanes N` with a number that includes it.",
    UNOWNED: "Start a daemon on this store if none is running. A running daemon acquires the lane within seconds.",
    ONE_ID: "Change nothing in the store, and report it: delayer never reuses an id. Was a backup restored in part?",
    SAME: (
        "A few are expected after a crash or a lost connection. Many, or some without a fault, mean that a publisher "
        "sends twice. `delayer cancel ID` removes one."
    ),
    COLLIDES: "All of them are delivered. Cancel the surplus messages by their ids, and report this.",
    UNREACHABLE: "It is delivered like any other. To cancel it, use its id instead of its key. Report this.",
    DANGLES: "No message is affected. Report this, with the details.",
    UNPLANNED: "It sends nothing any more. Report this, then pause and resume the schedule, so that it goes on.",
    ASTRAY: "It sends one more message, and then nothing. Report this, then pause and resume the schedule.",
    UNSCHEDULED: "It is delivered once, like any other message. Cancel it if it should not be, and report this.",
    UNREAD: (
        "See `delayer status` and the daemons' logs. The owner of the first lane reads the inbox, unless the broker "
        "rejects what it has to publish (`consuming interrupted`)."
    ),
    PEAK: "If draining takes too long, spread the due times in the publishers, or add daemons.",
    "missing": f"Declare the exchange or the queue {_IN_TIME}",
    "unroutable": f"Bind a queue to the exchange with this key {_IN_TIME}",
    "closed": "The exchange is internal, so nobody may publish to it. Declare another one, or cancel the messages.",
    "alternate": "Only the alternate exchange accepts them. Bind a queue with this key, unless that is intended.",
}
"""By fault; for destinations, by the broker's verdict (broker.route_check.Verdict)."""
