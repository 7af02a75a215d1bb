"""Files that commands write: whole or not at all, and never in place of what is no file.

What is renamed takes the place of whatever bears the name: of a symlink and not of what it leads to, and, where root
does it, of a device. So a symlink is followed, and devices and pipes are written into.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

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
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=".delayer-", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as out:
            yield out
            out.flush()
            os.fchmod(out.fileno(), 0o666 & ~_umask() if mode is None else mode)
            os.fsync(out.fileno())
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    """The process's; there is no way but to set it."""
    found = os.umask(0o077)
    os.umask(found)
    return found
