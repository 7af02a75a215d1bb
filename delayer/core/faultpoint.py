"""Named points at which a test can stop the process. They do nothing unless ``DELAYER_FAULT`` is set.

``DELAYER_FAULT=park.copied`` kills the process (SIGKILL) when it first reaches that point, ``park.copied:3`` the third
time. ``park.copied:1:stop`` stops it (SIGSTOP) instead, so that a test can kill the broker or the database, and resume
it with SIGCONT. The points are the rows of the crash tables in docs/guarantees.md, and the steps of compacting,
restoring, importing and draining.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

POINTS = frozenset(
    {
        "intake.read",  # The deliveries are read; nothing is published or parked.
        "intake.kept",  # Messages that are due soon are in memory; they are not acknowledged.
        "publish.begun",  # Some messages of a batch are written; the rest are not due yet.
        "publish.written",  # The frames are in the transport's buffer; there is no confirm yet.
        "intake.confirmed",  # The cascade, destination or refused queue confirmed; the delivery is not acknowledged.
        "intake.acked",  # The acknowledgement is in the transport's buffer.
        "park.copied",  # COPY is done; the transaction is open.
        "park.committed",  # The rows are committed; the delivery is not acknowledged.
        "release.claimed",  # The rows are deleted in an open transaction; nothing is published.
        "release.published",  # All publishes are confirmed; the transaction is open.
        "release.committed",  # The transaction is committed.
        "compact.locked",  # The rows of a window are locked; nothing is written.
        "compact.written",  # The segment is inserted, the rows still exist, and the transaction is open.
        "compact.verified",  # The segment was read back and compared.
        "compact.deleted",  # The rows are deleted and counted; the transaction is open.
        "compact.committed",  # The transaction is committed.
        "restore.locked",  # A segment is locked; nothing is written.
        "restore.copied",  # The segment's rows are written; the transaction is open.
        "restore.deleted",  # The segment is deleted and counted; the transaction is open.
        "restore.committed",  # The transaction is committed.
        "import.begun",  # The run is recorded; its source is unchanged.
        "import.staged",  # The source is staged; the store does not record this yet.
        "import.taken",  # A batch is read from the source; nothing of it is parked.
        "import.committed",  # A batch and its progress are committed; the source still has the batch.
        "import.removed",  # The source has removed the batch.
        "import.emptied",  # The source is empty and cleaned up; the store does not record this yet.
        "drain.taken",  # The rows are deleted in an open transaction; nothing is published.
        "drain.published",  # The cascade confirmed the messages; the transaction is open.
        "drain.committed",  # The transaction is committed.
    }
)


def _parse(text: str) -> tuple[str, int, signal.Signals] | None:
    if not text:
        return None
    name, _, rest = text.partition(":")
    nth, _, action = rest.partition(":")
    if name not in POINTS or action not in ("", "kill", "stop"):
        raise ValueError(
            f"DELAYER_FAULT: expected NAME[:NTH[:kill|stop]] with NAME of {sorted(POINTS)}, found {text!r}"
        )
    return name, int(nth or 1), signal.SIGSTOP if action == "stop" else signal.SIGKILL


_armed = _parse(os.environ.get("DELAYER_FAULT", ""))
_hits = 0


def _reach(point: str) -> None:
    if _armed is not None and _armed[0] == point:
        global _hits  # noqa: PLW0603 - One process has one armed fault, and one counter.
        _hits += 1
        if _hits == _armed[1]:
            os.kill(os.getpid(), _armed[2])


reach: Callable[[str], object] = bool if _armed is None else _reach
"""Mark a point as reached. Without an armed fault this calls a builtin."""
