"""Named points where a test can stop the process. Inert unless ``DELAYER_FAULT`` is set.

``DELAYER_FAULT=park.copied`` kills the process (SIGKILL) the first time it reaches that point; ``park.copied:3`` the
third time; ``park.copied:1:stop`` stops it (SIGSTOP) there instead, so that a test can kill the broker or the database
and let it go on with SIGCONT. The points are the rows of the crash tables in the design, section 7, and
the steps of compacting, restoring, importing and draining.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

POINTS = frozenset(
    {
        "intake.read",  # deliveries read, nothing published or parked
        "publish.written",  # frames handed to the transport, no confirm yet
        "intake.confirmed",  # cascade, destination or refused queue confirmed; delivery not acknowledged
        "intake.acked",  # acknowledgement handed to the transport
        "park.copied",  # COPY done, transaction open
        "park.committed",  # committed, delivery not acknowledged
        "release.claimed",  # rows deleted in an open transaction, nothing published
        "release.published",  # every confirm is here, transaction open
        "release.committed",  # committed
        "compact.locked",  # the rows of a window are locked, nothing written
        "compact.written",  # the segment is inserted, the rows are still there, transaction open
        "compact.verified",  # it was read back and compared
        "compact.deleted",  # the rows are deleted and counted, transaction open
        "compact.committed",  # committed
        "restore.locked",  # a segment is locked, nothing written
        "restore.copied",  # its rows are written, transaction open
        "restore.deleted",  # the segment is deleted and counted, transaction open
        "restore.committed",  # committed
        "import.begun",  # the run is written down, nothing of its source is touched
        "import.staged",  # the source is staged, the store does not know yet
        "import.taken",  # a batch is read from the source, nothing of it is parked
        "import.committed",  # a batch and its progress are committed, its source still has it
        "import.removed",  # the source has removed the batch
        "import.emptied",  # the source has nothing left and is cleaned up, the store does not know yet
        "drain.taken",  # rows deleted in an open transaction, nothing published
        "drain.published",  # the cascade confirmed them, transaction open
        "drain.committed",  # committed
        "drain.read",  # a level's messages are read, nothing is parked
        "drain.parked",  # parked and committed, not acknowledged
        "drain.acked",  # acknowledgement handed to the transport
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
        global _hits  # noqa: PLW0603 - one counter for the one armed fault of this process
        _hits += 1
        if _hits == _armed[1]:
            os.kill(os.getpid(), _armed[2])


reach: Callable[[str], object] = bool if _armed is None else _reach
"""Say that a point is reached. Without an armed fault this is a call of a builtin."""
