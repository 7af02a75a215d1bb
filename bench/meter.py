"""CPU and memory of whole process trees: the daemon with its workers, the broker, the database with its sessions."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import psutil

Pids = Callable[[], Iterable[int]]
"""A function for the current processes of one tree."""


def tree(root: int) -> list[int]:
    """A process and all of its descendants; empty when it is gone."""
    try:
        process = psutil.Process(root)
        return [root, *(child.pid for child in process.children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU seconds of living processes and of their ended descendants, such as closed sessions."""
    total = 0.0
    for pid in pids:
        try:
            times = psutil.Process(pid).cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def peak_mb(root: int) -> float:
    """The highest resident memory of each process of a tree so far, added up, in MB (10^6 bytes)."""
    return sum(_high_water_kb(pid) for pid in tree(root)) * 1024 / 1e6


def _high_water_kb(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def memory_mb(pids: Iterable[int]) -> float:
    """The memory of these processes now, in MB; a page that several of them share counts once (their PSS)."""
    return sum(map(_shared_out_kb, pids)) * 1024 / 1e6


def job_memory_mb(pids: Iterable[int]) -> dict[str, float]:
    """The memory of a Spark job's processes as :func:`memory_mb` counts it: of Java, Python workers, and the driver."""
    found = {"jvm": 0.0, "workers": 0.0, "driver": 0.0}
    for pid in pids:
        found[_kind(pid)] += memory_mb([pid])
    return found


def _kind(pid: int) -> str:
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        line = [b""]
    if line[0].endswith(b"java"):
        return "jvm"
    return "workers" if b"pyspark.daemon" in line else "driver"


def _shared_out_kb(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


class Meter:
    """The CPU that each of several trees used since the last reading."""

    def __init__(self, trees: Mapping[str, Pids]) -> None:
        self._trees = trees
        self._last: dict[str, float] = {}
        self.read()

    def read(self) -> dict[str, float]:
        """CPU seconds by name since the last reading."""
        now = {name: cpu_seconds(pids()) for name, pids in self._trees.items()}
        used = {name: max(now[name] - self._last.get(name, 0.0), 0.0) for name in now}  # an ended tree: 0
        self._last = now
        return used


class Neighbours:
    """The CPU used by other programs during the measurement; if high, the figures are unreliable."""

    def __init__(self) -> None:
        self._began, self._busy = time.monotonic(), self._others()

    def cores(self) -> float:
        """The average number of cores that they kept busy so far."""
        return max(self._others() - self._busy, 0.0) / max(time.monotonic() - self._began, 1e-9)

    @staticmethod
    def _others() -> float:
        """CPU seconds of the machine, with stolen ones, without those of this process and its descendants."""
        times = psutil.cpu_times()
        busy = times.user + times.nice + times.system + times.irq + times.softirq + times.steal
        return busy - cpu_seconds(tree(os.getpid()))
