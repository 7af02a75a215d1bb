"""Files that commands write: whole or not at all, and never in place of what is no file.

What is renamed takes the place of whatever bears the name: of a symlink and not of what it leads to, and, where root
does it, of a device. So a symlink is followed, and devices and pipes are written into.

Who writes keeps a lock (flock) on the half of a file; so one of a writer that was killed is known, and the next writer
of the same file removes it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final

_SUFFIX: Final = ".part"
_RANDOM: Final = 8
"""Characters that mkstemp puts between prefix and suffix."""
_LONGEST_NAME: Final = 200
"""Bytes of a name that leave room for these and for the rest of the prefix, where 255 is the limit."""
_OPEN_ALREADY: Final = ("/dev/fd/", "/dev/std", "/proc/")
"""Where names of our own open files are: whoever gave us one reads or has written what it is, not what its name is."""


def replaced(path: Path) -> Path | None:
    """The file that takes the place of what ``path`` leads to; None where that is written into as it is.

    Raises OSError where it is neither a file nor something that only takes what is written: a disk would be lost.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return path.resolve()
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if stat.S_ISREG(mode):
        return None if str(path.absolute()).startswith(_OPEN_ALREADY) else path.resolve()
    if stat.S_ISCHR(mode) or stat.S_ISFIFO(mode):
        return None
    kind = "a disk" if stat.S_ISBLK(mode) else "a socket"
    raise OSError(errno.EINVAL, f"expected a file, a pipe or a character device, found {kind}")


@contextmanager
def replacing(path: Path, *, mode: int | None = None) -> Iterator[IO[bytes]]:
    """What is written becomes the file at ``path`` when all of it is; otherwise what was there stays.

    A device or a pipe gets it at once. ``mode``: of the file; like any other new file's by default. Raises OSError.
    """
    target = replaced(path)
    if target is None:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC), "wb") as out:
            yield out
        return
    _remove_leftovers(target)
    handle, name = _begun(target)
    try:
        with os.fdopen(handle, "wb") as out:
            yield out
            out.flush()
            os.fchmod(out.fileno(), 0o666 & ~_umask() if mode is None else mode)
            os.fsync(out.fileno())
            Path(name).replace(target)  # while it is locked: nobody takes it for a leftover
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _prefix(target: Path) -> str:
    """Of the names of its halves; what is long is cut, and a digest says which it is."""
    name = os.fsencode(target.name)
    if len(name) <= _LONGEST_NAME:
        return f".delayer-{target.name}-"
    return f".delayer-{hashlib.sha256(name).hexdigest()}-"


def _begun(target: Path) -> tuple[int, str]:
    """A new half of ``target``, open and locked, and its name."""
    while True:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=_prefix(target), suffix=_SUFFIX)
        with suppress(OSError):  # a file system without locks: then nobody else gets one either, and leftovers stay
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return handle, name
        os.close(handle)  # somebody took it for a leftover before it was locked


def _remove_leftovers(target: Path) -> None:
    """What writers of ``target`` left that were killed. What cannot be removed, another user's say, stays."""
    name = re.compile(re.escape(_prefix(target)) + f".{{{_RANDOM}}}" + re.escape(_SUFFIX), re.DOTALL)
    try:
        with os.scandir(target.parent) as entries:
            left = [one.path for one in entries if name.fullmatch(one.name) and one.is_file(follow_symlinks=False)]
    except PermissionError:
        return  # whoever may not list a directory may perhaps write there
    for path in left:
        with suppress(OSError):
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                Path(path).unlink()
            finally:
                os.close(handle)


def _umask() -> int:
    """The process's; there is no way but to set it."""
    found = os.umask(0o077)
    os.umask(found)
    return found
