"""The two crash tables of docs/guarantees.md as values; and that of restoring a segment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tests.faults.scenes import BROKER, BROKER_CUT, DAEMON, ONCE, PERHAPS_TWICE, POSTGRES, STORE_CUT, TWICE, Copies, Row


def native(fault: str, copies: tuple[Copies, ...], after: Mapping[str, int], **more: Any) -> Row:
    """``copies``: if the daemon dies, the broker, or the connections to it. The delay is long enough for the cascade,
    whose minimum is a second."""
    more = {"delay_ms": 2_500} | more
    return Row("native", fault, dict(zip((DAEMON, BROKER, BROKER_CUT), copies, strict=True)), after, **more)


def store(fault: str, copies: tuple[Copies, ...], after: Mapping[str, int], **more: Any) -> Row:
    """``copies``: if the daemon dies, the broker, Postgres, the connections to the broker, or those to Postgres. All
    daemons that have a claim stop at about the same time: Postgres ends the claim of a daemon stalled for 4 s."""
    more = {"delay_ms": 2_500} | more
    deaths = (DAEMON, BROKER, POSTGRES, BROKER_CUT, STORE_CUT)
    return Row("store", fault, dict(zip(deaths, copies, strict=True)), after, **more)


# A daemon that outlives its connections may publish a message over new ones that it had read over the old ones. Then
# the broker delivers it again: so "once" needs the daemon dead, or an acknowledgement that arrived.
READ = (ONCE, PERHAPS_TWICE, PERHAPS_TWICE)
PUBLISHED = (PERHAPS_TWICE,) * 3
CONFIRMED = (TWICE,) * 3
# The acknowledgement is handed to the transport at this point, not sent. With a prefetch of 1, the second message was
# only delivered because the first acknowledgement arrived.
ACKED = {"messages": 2, "prefetch": 1}
IN_THE_BROKER = {"delay_ms": 8_000}
"""All rows of a scene wait for their points before a broker dies. So long a delay keeps the envelope out of the due
consumer's hands until then: otherwise the broker's death interrupts two deliveries instead of one."""
AT_THE_END = {"same_id": True}
"""Points between the due queue and the destination: a copy has the id of the message."""

# The first publish to an exchange is a probe in the isolation, which writes a message without a queue before it. So the
# writes are counted in pairs.
NATIVE: Mapping[str, Row] = {
    "reading it": native("intake.read", READ, {"delays": 1, "out": 0}, absolute=False),
    "keeping it": native("intake.kept", READ, {"delays": 1, "out": 0}, absolute=False, delay_ms=900),
    "the publish": native("publish.written:2", PUBLISHED, {"delays": 1}, **IN_THE_BROKER),
    "the confirm": native("intake.confirmed", CONFIRMED, {"delays": 1, "out": 0}, **IN_THE_BROKER),
    "the ack": native("intake.acked:2", PUBLISHED, {"out": 0}, **ACKED, **IN_THE_BROKER),
    "reading it when due": native("intake.read:2", READ, {"delays": 0, "delays.due": 1, "out": 0}, **AT_THE_END),
    # A broker that delays keeps the rest of a second itself.
    "keeping it when due": native(
        "intake.kept", READ, {"delays": 0, "delays.due": 1, "out": 0}, **AT_THE_END, delay_ms=1_900, strategy="cascade"
    ),
    "the publish when due": native("publish.written:4", PUBLISHED, {"delays": 0, "delays.due": 1}, **AT_THE_END),
    "the confirm when due": native(
        "intake.confirmed:2", CONFIRMED, {"delays": 0, "delays.due": 1, "out": 1}, **AT_THE_END
    ),
    "the ack when due": native("intake.acked:4", PUBLISHED, {"delays": 0, "out": 2}, **AT_THE_END, **ACKED),
}
STORE: Mapping[str, Row] = {
    "reading a message due soon": store(
        "intake.kept", (ONCE, *(PERHAPS_TWICE,) * 4), {"delays": 1, "store": 0, "out": 0}, absolute=False, delay_ms=140
    ),
    "COPY before commit": store(
        "park.copied", (ONCE, PERHAPS_TWICE, ONCE, TWICE, ONCE), {"delays": 1, "store": 0, "out": 0}, absolute=False
    ),
    "commit before the ack": store(
        "park.committed", (TWICE, TWICE, ONCE, TWICE, ONCE), {"delays": 1, "store": 1, "out": 0}, delay_ms=5_000
    ),
    "claim before the publish": store(
        "release.claimed", (ONCE, PERHAPS_TWICE, ONCE, ONCE, ONCE), {"delays": 0, "store": 1, "out": 0}, same_id=True
    ),
    # Messages of several claims, parked long before. The daemon reaches this point when it has written part of one,
    # before the rest is due: a busy machine is late for some claims, not for all. A second publish may stay unconfirmed
    # after a broker restart, or after the store ends the claim of a waiting daemon.
    "publish of a part of the claim": store(
        "publish.begun",
        (PERHAPS_TWICE, (1, 3), (1, 3), PERHAPS_TWICE, PERHAPS_TWICE),
        {"delays": 0},
        same_id=True,
        messages=100,
        step_ms=20,
    ),
    "publish before its confirm": store(
        "publish.written:2", (PERHAPS_TWICE,) * 5, {"delays": 0, "store": 1}, same_id=True
    ),
    "publish before commit": store(
        "release.published", (TWICE, PERHAPS_TWICE, ONCE, ONCE, ONCE), {"delays": 0, "store": 1, "out": 1}, same_id=True
    ),
    "commit of the release": store("release.committed", (ONCE,) * 5, {"delays": 0, "store": 0, "out": 1}),
}
PACKED = 20


def restore(fault: str, rows: int, packed: int, stopped: Copies = ONCE) -> Row:
    """``rows`` and ``packed``: how many of the messages wait, and are in the segment, when the daemon is dead.
    ``stopped``: the copies if the daemon resumes after its store died. The delay is long, because on a busy machine the
    daemon that parks the messages takes seconds to stop, and must not release them before."""
    copies = {DAEMON: ONCE, POSTGRES: stopped, STORE_CUT: stopped}
    after = {"delays": 0, "store": rows, "segments": packed, "out": 0}
    return Row("store", fault, copies, after, same_id=True, delay_ms=15_000, messages=PACKED, prepared="compacted")


# In addition to these tables: the process dies in the middle of restoring a segment. Nothing of it was published before
# the commit. After it a lane's claim may already be answered: the daemon reads that answer when it resumes.
RESTORE: Mapping[str, Row] = {
    "lock of the segment": restore("restore.locked", 0, PACKED),
    "copy of its rows": restore("restore.copied", 0, PACKED),
    "deletion of the segment": restore("restore.deleted", 0, PACKED),
    "commit of the restore": restore("restore.committed", PACKED, 0, PERHAPS_TWICE),
}


def sent_by_sql(mode: str, fault: str, daemon: Copies, others: Copies, after: Mapping[str, int], delay_ms: int) -> Row:
    """``daemon``: the copies if the daemon dies; ``others``: if it stops while a server dies or a connection breaks.
    Then Postgres ends its session, and with it the lock of the inbox."""
    deaths = (BROKER, POSTGRES, BROKER_CUT, STORE_CUT)
    return Row(mode, fault, {DAEMON: daemon, **dict.fromkeys(deaths, others)}, after, delay_ms=delay_ms, by_sql=True)


# A daemon dies while it moves a message out of the SQL inbox. What it parks, it parks once.
INBOX: Mapping[str, Row] = {
    "reading a row": sent_by_sql("store", "intake.read", ONCE, PERHAPS_TWICE, {"inbox": 1, "store": 0}, 2_500),
    "COPY before commit": sent_by_sql("store", "park.copied", ONCE, ONCE, {"inbox": 1, "store": 0}, 2_500),
    "commit": sent_by_sql("store", "park.committed", ONCE, ONCE, {"inbox": 0, "store": 1}, 5_000),
    "publish at once": sent_by_sql("store", "publish.written:2", PERHAPS_TWICE, PERHAPS_TWICE, {"inbox": 1}, 0),
    "confirm before the deletion of the row": sent_by_sql(
        "store", "intake.confirmed", TWICE, PERHAPS_TWICE, {"inbox": 1, "out": 1}, 0
    ),
    "deletion of the row": sent_by_sql("store", "inbox.deleted", ONCE, ONCE, {"inbox": 0, "out": 1}, 0),
    "the cascade's confirm before the deletion of the row": sent_by_sql(
        "native", "intake.confirmed", TWICE, PERHAPS_TWICE, {"inbox": 1, "out": 0}, 8_000
    ),
    "deletion of the row of a message in the cascade": sent_by_sql(
        "native", "inbox.deleted", ONCE, ONCE, {"inbox": 0, "out": 0}, 8_000
    ),
}


class ScheduleRow(NamedTuple):
    """A row of the crash table of schedules. ``fault``: the point, and the pass that counts. ``copies``: how often each
    occurrence arrives. Those of the daemon's claim may come twice (G3); all others come once."""

    fault: str
    copies: Copies


# A daemon dies in the release of an occurrence, whose transaction also writes the next one.
SCHEDULE: Mapping[str, ScheduleRow] = {
    "claim before the publish": ScheduleRow("release.claimed:3", ONCE),
    "publish before the next occurrence": ScheduleRow("release.published:3", PERHAPS_TWICE),
    "next occurrence before commit": ScheduleRow("schedule.copied:3", PERHAPS_TWICE),
    "commit before the next claim": ScheduleRow("release.committed:3", ONCE),
}
# An operator's process dies in the change of a schedule, and the daemon goes on. Whether the change was committed.
CHANGED: Mapping[tuple[str, str], bool] = {
    ("cancel", "schedule.copied"): False,
    ("pause", "schedule.committed"): True,
    ("edit", "schedule.copied"): False,
    ("edit", "schedule.committed"): True,
}


def cases(rows: Mapping[str, Row]) -> list[tuple[str, str]]:
    """Every row's name with each of its deaths."""
    return [(name, death) for name, row in rows.items() for death in row.copies]
