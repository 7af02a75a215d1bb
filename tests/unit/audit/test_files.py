"""Output files of commands: written completely or not at all, and only a file is replaced."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from delayer.audit.files import replacing
from tests.unit.audit import audit_reports

EMPTY = audit_reports.empty()


class Interrupted(Exception):
    """An error in the middle of a write."""


def write(path: Path, text: bytes = b"new", mode: int = 0o666) -> None:
    with replacing(path, mode=mode) as out:
        out.write(text)


def names(directory: Path) -> list[str]:
    return sorted(one.name for one in directory.iterdir())


def test_a_new_file(tmp_path: Path) -> None:
    write(tmp_path / "a")
    write(tmp_path / "b", mode=0o600)
    assert (tmp_path / "a").read_bytes() == b"new"
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o666 & ~umask
    assert stat.S_IMODE((tmp_path / "b").stat().st_mode) == 0o600
    assert names(tmp_path) == ["a", "b"]


def test_the_old_file_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with pytest.raises(Interrupted), replacing(path) as out:
        out.write(b"half")
        raise Interrupted
    assert path.read_bytes() == b"old"
    write(path)
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("there", [True, False])
def test_a_symlink_is_followed(tmp_path: Path, there: bool) -> None:
    away = tmp_path / "away"
    away.mkdir()
    link = tmp_path / "link"
    link.symlink_to(away / "target")
    if there:
        (away / "target").write_bytes(b"old")
    write(link)
    assert link.is_symlink()
    assert (away / "target").read_bytes() == b"new"
    assert names(away) == ["target"]


def test_our_own_open_file_is_written_into_and_not_replaced(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as out:
        out.write(b"before ")
        out.flush()
        write(Path(f"/proc/self/fd/{out.fileno()}"))
        assert os.path.samestat(os.fstat(out.fileno()), (tmp_path / "out").stat())
    assert (tmp_path / "out").read_bytes() == b"before new"


def test_a_directory_or_a_disk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        write(tmp_path)
    with pytest.raises(FileNotFoundError):
        write(tmp_path / "no" / "where")
    disk = tmp_path / "disk"
    try:
        os.mknod(disk, 0o600 | stat.S_IFBLK, os.makedev(259, 65_000))
    except PermissionError:
        return
    with pytest.raises(OSError, match="expected a file, a pipe or a character device, found a disk"):
        write(disk)
    assert disk.is_block_device()
