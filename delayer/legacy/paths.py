"""A source's file: reading it, and whether it is what it was. Everything raises SourceLost."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from delayer.legacy.ports import SourceLost


def opened(path: Path) -> BufferedReader:
    """At its beginning."""
    try:
        return path.open("rb")
    except OSError as error:
        raise SourceLost(f"{path}: {error.strerror}") from error


def lines(path: Path) -> Iterator[bytes]:
    """All of them, with their ends."""
    with opened(path) as file:
        try:
            yield from file
        except OSError as error:
            raise SourceLost(f"{path}: {error.strerror}") from error


def seen_now(path: Path) -> tuple[int, int, int]:
    """What differs where the file is another one, or was written to."""
    try:
        found = path.stat()
    except OSError as error:
        raise SourceLost(f"{path}: {error.strerror}") from error
    return found.st_ino, found.st_size, found.st_mtime_ns


def digest(path: Path) -> str:
    """By which it is known again."""
    with opened(path) as file:
        try:
            return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise SourceLost(f"{path}: {error.strerror}") from error
