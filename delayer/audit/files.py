"""Atomic replacement of files."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_OPEN_ALREADY = ("/dev/fd/", "/dev/std", "/proc/")


@contextmanager
def replacing(path: Path, *, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """Yield a file that replaces ``path`` once completely written. On an error the previous file stays.

    Follows a symlink. Writes directly to a pipe, a device, or a file that this process already has open. ``mode`` is
    subject to the umask. Raises OSError.
    """
    if path.is_block_device():
        raise OSError(errno.EINVAL, "expected a file, a pipe or a character device, found a disk")
    target = Path(os.path.realpath(path))  # A loop of symlinks is not resolved.
    if (target.exists() and not target.is_file()) or str(path.absolute()).startswith(_OPEN_ALREADY):
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC), "wb") as out:
            yield out
        return
    part = target.with_name(f".delayer-{os.urandom(8).hex()}.part")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with os.fdopen(os.open(part, flags, mode), "wb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        part.replace(target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
