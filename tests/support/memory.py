"""Killing a process as the kernel does when memory is short."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil

_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
_LIMIT = 4096
_PATIENCE = 5.0


def out_of_memory(pid: int) -> bool:
    """Put the process into a control group without memory, and return when it is dead. Kill it ourselves where that is
    not allowed, or where the process needs no more memory. Return whether the kernel killed it."""
    group = _group(pid)
    try:
        if group is not None and _died(pid, _PATIENCE):
            return True
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _died(pid, _PATIENCE)
        return False
    finally:
        if group is not None:
            with suppress(OSError):
                group.rmdir()


def _group(pid: int) -> Path | None:
    name = f"delayer-test-{pid}"
    v1 = _V1.is_dir()
    group, limit = (_V1 / name, "memory.limit_in_bytes") if v1 else (_V2 / name, "memory.max")
    try:
        group.mkdir()
        (group / limit).write_text(str(_LIMIT))
        (group / "cgroup.procs").write_text(str(pid))
    except OSError:
        with suppress(OSError):
            group.rmdir()
        return None
    return group


def _died(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False
