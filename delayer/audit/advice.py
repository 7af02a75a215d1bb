"""What each rule means, and what to do when it found something: the words of the reports. docs/backlog.md has more."""

from __future__ import annotations

from typing import Final, NamedTuple


class Advice(NamedTuple):
    """``title`` of the rule, what a finding ``means``, and the ``next`` step."""

    title: str
    means: str
    next: str


_FALLBACK: Final = Advice("", "A rule found something.", "See docs/backlog.md for this rule.")

ADVICE: Final[dict[str, Advice]] = {
    "conservation": Advice(
        "Conservation",
        "What came in is not what went out plus what is here: the counters and the rows of one snapshot disagree.",
        "Keep the store as it is and find out who changed rows or counters besides delayer (psql, a restore of a "
        "backup, replication). Fewer rows than expected are messages that are missing. If you know why, correct "
        "`counter`.",
    ),
    "segments": Advice(
        "Segments",
        "A segment does not hold what it says: its count, its digest, its ranges or its cancelled messages disagree, "
        "or it does not read back. Or it was not restored in time.",
        "Do not delete it: its bytes are kept and it stops nobody. Restore the row of `segment` from a backup or "
        "a replica, or ask for help with its id. Late ones: is a daemon running, and what does its log say? "
        "`delayer restore` brings them back at once.",
    ),
    "integrity": Advice(
        "Integrity",
        "Rows whose bytes are not what was parked, cannot be decoded, are of an unknown format, or lie in the "
        "wrong partition: a daemon holds such a message and does not send it. Or places of a table that the database "
        "itself cannot read.",
        "Check the disks and the checksums of Postgres (`pg_amcheck`); what it cannot read comes back from a backup "
        "or a replica only. An unknown format is a daemon that is older than its store: upgrade it.",
    ),
    "overdue": Advice(
        "Overdue",
        "Messages are past their due time and still here.",
        "See `delayer status` and the daemon's log: is a daemon running, does it reach the broker, does the "
        "broker block publishers? After an outage this drains by itself. Of routes with max_rate it "
        "takes as long as their number divided by that rate.",
    ),
    "lanes": Advice(
        "Lanes without an owner",
        "No daemon holds these lanes. What is in them stays until one takes them over, which happens within "
        "seconds of something in them being due soon, if a daemon runs.",
        "Start a daemon on this store, if none runs. If nothing in the lane is due soon, nothing is to be done.",
    ),
    "repeats": Advice(
        "Repeats",
        "The same message is here more than once (same `message_id`, destination, due time and body), and will be "
        "delivered as often. That one id of the store stands in two places must never be.",
        "After a crash or a cut connection a few equal messages are expected; many, or without a fault, are a "
        "publisher that sends twice. One id in two places: keep the store as it is, and report it.",
    ),
    "destinations": Advice(
        "Destinations that cannot take them",
        "If these messages were due now, the broker would not take them: they would be held and tried again, not "
        "lost. Some may be held already.",
        "Declare the exchange or the queue, or bind it, before the first of them is due; or cancel the messages. Held "
        "ones are tried again by themselves, or at once by `delayer held retry`.",
    ),
    "keys": Advice(
        "Keys",
        "A key (`x-delay-key`) stands for a message that is not there, or messages with a key are not what their "
        "key stands for: replacing and cancelling them would miss.",
        "Those messages are delivered as any other. Please report it, with what the details say.",
    ),
    "peaks": Advice(
        "Peaks",
        "More is due at one time than can be released at once.",
        "See how long it takes to drain. If that is too late, spread the due times where they are made, or add "
        "workers.",
    ),
}


def advice(rule: str) -> Advice:
    """For any rule, also for one of a newer version."""
    return ADVICE.get(rule) or _FALLBACK._replace(title=rule)
