"""The process that stops our servers when we cannot: it watches a pipe, and cleans up however we die.

Run by `processes.py` as `python reaper.py`, in a separate session so that Ctrl-C does not reach it. Each line on its
standard input is an instruction. End of input means the writer is dead, and the reaper carries them out:

    watch PID SIGNAL    end this process and its descendants with SIGNAL, then any survivors with SIGKILL
    forget PID          the writer ended it properly
    unmount DIRECTORY   after the processes, unmount the file system there, if there is one
    forget DIRECTORY    the writer unmounted it properly
    remove DIRECTORY    after all that, delete this directory
    forget DIRECTORY    the writer deleted it properly
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable

import psutil

GRACE_SECONDS = 5.0


def family(pid: int) -> list[psutil.Process]:
    """The process and its descendants, parents first; empty when it is gone."""
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def send(processes: Iterable[psutil.Process], sig: int) -> None:
    for process in processes:
        try:
            process.send_signal(sig)
        except psutil.NoSuchProcess:
            continue


def wait_dead(processes: Iterable[psutil.Process], timeout: float) -> None:
    """Return when all have ended, or after `timeout` seconds.

    A zombie without threads has ended: its files, ports and memory are free. In a zombie with threads, only the main
    thread has ended, and the rest may still hold a port.
    """
    deadline = time.monotonic() + timeout
    while any(_is_alive(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(0.005)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1
    except psutil.NoSuchProcess:
        return False


def end(pid: int, sig: int, grace: float = GRACE_SECONDS) -> None:
    """Stop the process and all its descendants, even paused ones, and return when they are gone.

    `sig` goes only to the process, which has `grace` seconds to stop its children. Then SIGKILL goes to all.
    """
    processes = family(pid)
    if not processes:
        return
    send(processes, signal.SIGCONT)
    if sig != signal.SIGKILL:
        send(processes[:1], sig)
        wait_dead(processes, grace)
    send(processes, signal.SIGKILL)
    wait_dead(processes, GRACE_SECONDS)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    processes: dict[str, int] = {}
    mounts: dict[str, None] = {}
    directories: dict[str, None] = {}
    for line in sys.stdin:
        verb, _, rest = line.rstrip("\n").partition(" ")
        if verb == "watch":
            pid, sig = rest.split()
            processes[pid] = int(sig)
        elif verb == "unmount":
            mounts[rest] = None
        elif verb == "remove":
            directories[rest] = None
        else:
            processes.pop(rest, None)
            mounts.pop(rest, None)
            directories.pop(rest, None)
    for pid_text, sig_number in processes.items():
        end(int(pid_text), sig_number)
    for mount in mounts:
        subprocess.run(["umount", "--lazy", mount], capture_output=True, check=False)
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    os.chdir("/")
    main()
