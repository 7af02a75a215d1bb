"""What docs/backlog.md calls the figures of compaction and restoring, and why a target is out of reach where it is."""

from __future__ import annotations

from typing import Final

ROWS: Final = (
    ("compacting", "compact, rate"),
    ("its time", "compact, seconds"),
    ("and that of giving the room back", "compact, giving room back"),
    ("with the start of Spark", "compact, seconds with all around it"),
    ("on disk before, a row", "bytes a message before"),
    ("on disk after, a message", "bytes a message after"),
    ("shrinks by", "shrinks by"),
    ("restoring in bulk", "restore, rate"),
    ("its time", "restore, seconds"),
    ("with the start of Spark", "restore, seconds with all around it"),
    *(
        row
        for one, verb in (("compact", "compacting"), ("restore", "restoring"))
        for row in (
            (f"{verb} beside traffic", f"{one} beside traffic, rate"),
            ("messages due meanwhile", f"beside {one}, due meanwhile"),
            ("their lateness, p50", f"beside {one}, lateness p50"),
            ("p99", f"beside {one}, lateness p99"),
            ("the latest", f"beside {one}, lateness max"),
            ("missing", f"beside {one}, missing"),
            ("early", f"beside {one}, early"),
        )
    ),
)
"""What the page calls the figures of section ``compaction``."""
OWN_ROWS: Final = ("restore, rate", *(f"{one} beside traffic, rate" for one in ("compact", "restore")))
"""Figures of fewer rows than the run's."""

_SHARED: Final = "the two cores, which Postgres, the JVM and the Python processes share. "
LIMITS: Final = {
    "full read": (
        f"{_SHARED}The first read of a session pays for the start of Python processes and for a JVM that is not yet "
        "compiled, once, however much there is to read. It grows with the cores, up to the disks."
    ),
    "compact, rate": (
        f"{_SHARED}Half of a message's time is zstd, Parquet and reading back, a third is Postgres: locking, gathering "
        "and deleting. A lower level of zstd comes too close to the 8-fold; not reading back would save a sixth, and "
        "it is a check that stays. Two million rows stayed above the target on this machine, five million do not: "
        "what is no longer in memory is read from the disk and written back, which takes processor time here as "
        "well. It grows with the cores, up to the database's."
    ),
    "restore, rate": f"{_SHARED}Half of it is the `COPY` and its log. Daemons restore by themselves in time.",
    "restore, seconds with all around it": (
        "the start of Spark, once, however much there is to restore: two JVMs one after the other, Spark's classes, "
        "and Python processes that load Arrow."
    ),
    "beside compact, lateness p99": "commits of the daemon that wait for the disk, which packing writes to as well.",
    "beside restore, lateness p99": "commits of the daemon that wait for the disk, which restoring writes to as well.",
}
"""What stops a target that a run missed, by its figure."""
