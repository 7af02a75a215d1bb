"""Directories of a run on this machine: for this user only, removed at its end, or by a later run if it was killed.

Beside each lies a lock that its run holds (flock): the kernel lets go of it when the process is gone, however it went.
So a directory whose lock is free is a dead run's. The lock names the machine, as several may share a directory: a run
removes what dead runs of its own machine and user left, and nothing else.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

EXTRACT: Final = "delayer-audit-"
SCRATCH: Final = "delayer-spark-"
_LOCK: Final = ".lock"


@contextmanager
def place(parent: Path, prefix: str) -> Iterator[Path]:
    """A fresh directory below ``parent``, after what dead runs left there is gone. Raises OSError."""
    sweep(parent)
    lock, held = _locked(parent, prefix)
    made = lock.with_name(lock.name.removesuffix(_LOCK))
    try:
        made.mkdir(mode=0o700)
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        if not made.exists():
            lock.unlink(missing_ok=True)
        os.close(held)


def sweep(parent: Path) -> list[Path]:
    """Remove what dead runs on this machine left below ``parent``; which directories that were."""
    gone = []
    locks = [path for prefix in (EXTRACT, SCRATCH) for path in parent.glob(f"{prefix}*{_LOCK}")]
    for lock in sorted(locks):
        try:
            held = _hold(lock)
        except OSError:  # another user's, or just removed
            continue
        if held is None:
            continue
        try:
            if os.fstat(held).st_uid != os.geteuid() or os.pread(held, 256, 0) != _machine():
                continue
            left = lock.with_name(lock.name.removesuffix(_LOCK))
            shutil.rmtree(left, ignore_errors=True)
            # What a JVM in its last moments wrote behind our back is left to the next run.
            if not left.exists():
                lock.unlink(missing_ok=True)
                gone.append(left)
        finally:
            os.close(held)
    return gone


def _locked(parent: Path, prefix: str) -> tuple[Path, int]:
    """A new lock, held. It has its content before it has its name: one without is nobody's."""
    handle, name = tempfile.mkstemp(prefix=f".{prefix}", dir=parent)
    fcntl.flock(handle, fcntl.LOCK_EX)
    os.write(handle, _machine())
    made = Path(name)
    lock = made.with_name(f"{made.name.removeprefix('.')}{_LOCK}")
    made.rename(lock)
    return lock, handle


def _machine() -> bytes:
    return socket.gethostname().encode()


def _hold(lock: Path) -> int | None:
    """The lock, held; None where somebody else holds it. Raises OSError."""
    handle = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle
