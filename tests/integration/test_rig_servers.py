"""The rig's servers do what fault tests rely on: they come back as they were, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import asyncpg
import psutil
import pytest

ROOT = Path(__file__).parents[2]


async def test_postgres_writes_to_disk(database: str) -> None:
    connection = await asyncpg.connect(database)
    assert await connection.fetchval("SHOW fsync") == "on"
    assert await connection.fetchval("SHOW synchronous_commit") == "on"
    await connection.close()


def _end_with_ctrl_c(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)


def _end_with_sigkill(process: subprocess.Popen[str]) -> None:
    process.kill()


def _names(family: Sequence[psutil.Process]) -> set[str]:
    """Of those that are still there: the broker's helper programs come and go."""
    names = set()
    for process in family:
        with suppress(psutil.NoSuchProcess):
            names.add(process.name())
    return names


@pytest.mark.parametrize("end", [_end_with_ctrl_c, _end_with_sigkill])
def test_nothing_outlives_its_owner(end: Callable[[subprocess.Popen[str]], None], tmp_path: Path) -> None:
    """The servers, their epmd and their directories are gone after Ctrl-C, and after SIGKILL to who started them."""
    owner = subprocess.Popen(
        [sys.executable, "-m", "tests.support.servers"],
        cwd=ROOT, env=os.environ | {"TMPDIR": str(_passable(tmp_path))}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert owner.stdout is not None
    try:
        for line in owner.stdout:
            if "Ctrl-C" in line:
                break
        family = psutil.Process(owner.pid).children(recursive=True)
        assert {"beam.smp", "epmd", "postgres"} <= _names(family)
        end(owner)
        owner.wait(timeout=30)
    finally:
        owner.kill()  # where the test fails, its servers are not to stay either
        owner.stdout.close()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == []
    assert list((tmp_path / "t").iterdir()) == []


def test_a_disk_does_not_outlive_its_owner(tmp_path: Path) -> None:
    """What was mounted for a server is unmounted after SIGKILL to who started it."""
    program = (
        "from tests.support.postgres_kinds import SmallDisk; SmallDisk(80).start(); print('up', flush=True); input()"
    )
    place = _passable(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, env=os.environ | {"TMPDIR": str(place)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as owner:  # fmt: skip
        assert owner.stdout is not None
        assert owner.stderr is not None
        if owner.stdout.readline() != "up\n":
            said = owner.stderr.read()
            assert "no disk of its own" in said, said
            pytest.skip(said.splitlines()[-1])
        assert str(place) in Path("/proc/self/mounts").read_text()
        family = psutil.Process(owner.pid).children(recursive=True)
        owner.kill()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == []
    assert str(place) not in Path("/proc/self/mounts").read_text()
    assert list(place.iterdir()) == []


def _passable(directory: Path) -> Path:
    """Pytest's directories are ours alone, and Postgres, as another user, has to get through to its own."""
    made = directory / "t"
    made.mkdir(mode=0o711)
    for parent in [directory, *directory.parents]:
        if parent == Path(tempfile.gettempdir()):
            break
        parent.chmod(0o711)
    return made
