"""Named points at which a test can stop the process. They do nothing unless ``DELAYER_FAULT`` is set.

``DELAYER_FAULT=park.copied`` kills the process (SIGKILL) when it first reaches that point, ``park.copied:3`` the third
time. ``park.copied:1:stop`` stops it (SIGSTOP) instead, so that a test can kill the broker or the database, and resume
it with SIGCONT. The points are the rows of the crash tables in docs/guarantees.md, and the steps of compacting,
restoring, importing and draining. The points of schedules are in transactions of releases and of operators.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

_BY_WORK = """
    intake.read intake.kept intake.confirmed intake.acked
    publish.begun publish.written
    park.copied park.committed
    inbox.deleted
    request.published
    release.claimed release.published release.committed
    schedule.copied schedule.committed
    compact.locked compact.written compact.verified compact.deleted compact.committed
    restore.locked restore.copied restore.deleted restore.committed
    import.begun import.staged import.taken import.committed import.removed import.emptied
    drain.taken drain.published drain.committed
"""
POINTS = frozenset(_BY_WORK.split())
"""Each is named for the step that is done when it is reached: the next one has not begun."""


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
