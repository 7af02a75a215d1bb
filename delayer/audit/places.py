"""Directories of a run on this machine: for this user only, removed at its end, or by a later run if it was killed.

Beside each lies a lock that its run holds (flock): the kernel lets go of it when the process is gone, however it went.
So a directory whose lock is free is a dead run's, as far as one kernel knows; and several machines may share a
directory. The lock says where its run is: a run removes what dead runs of its own user left on its own machine, and
nothing else. Pods may have one name, one after another or in two clusters, so a name says little: see :class:`Origin`.
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
from typing import Final, NamedTuple

EXTRACT: Final = "delayer-audit-"
SCRATCH: Final = "delayer-spark-"
_LOCK: Final = ".lock"
_BOOT, _MACHINE = Path("/proc/sys/kernel/random/boot_id"), Path("/etc/machine-id")


class Origin(NamedTuple):
    """Where a run is, or was: the host's name, the identity of the machine's installation ("" where it has none, as in
    most containers), and what its kernel called this run of itself."""

    host: str
    machine: str
    boot: str

    @classmethod
    def here(cls) -> Origin:
        return cls(socket.gethostname(), _first_line(_MACHINE), _first_line(_BOOT))

    @classmethod
    def read(cls, content: bytes) -> Origin | None:
        """What :meth:`written` gave; None for anything else."""
        parts = content.decode(errors="replace").split("\n")
        return cls(*parts) if len(parts) == 3 else None

    def written(self) -> bytes:
        return "\n".join(self).encode()

    def sees(self, other: Origin) -> bool:
        """Whether a free lock of ``other`` means that it is dead: both have one kernel, which knows; or it is this
        machine, by more than its name, before it was started again."""
        if self.boot and self.boot == other.boot:
            return True
        return bool(self.machine) and (self.host, self.machine) == (other.host, other.machine)


def _first_line(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").split("\n", 1)[0].strip()
    except (OSError, UnicodeDecodeError):  # there is none
        return ""


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
    here = Origin.here()
    locks = [path for prefix in (EXTRACT, SCRATCH) for path in parent.glob(f"{prefix}*{_LOCK}")]
    for lock in sorted(locks):
        try:
            held = _hold(lock)
        except OSError:  # another user's, or just removed
            continue
        if held is None:
            continue
        try:
            origin = Origin.read(os.pread(held, 1024, 0))
            if os.fstat(held).st_uid != os.geteuid() or origin is None or not here.sees(origin):
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
    os.write(handle, Origin.here().written())
    made = Path(name)
    lock = made.with_name(f"{made.name.removeprefix('.')}{_LOCK}")
    made.rename(lock)
    return lock, handle


def _hold(lock: Path) -> int | None:
    """The lock, held; None where somebody else holds it. Raises OSError."""
    handle = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle
