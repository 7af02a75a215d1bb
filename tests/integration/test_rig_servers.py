"""The rig's servers leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]


def _names(family: Sequence[psutil.Process]) -> set[str]:
    """Of those that are still there: the broker's helper programs come and go."""
    names = set()
    for process in family:
        with suppress(psutil.NoSuchProcess):
            names.add(process.name())
    return names


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_its_owner(end: signal.Signals, tmp_path: Path) -> None:
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
        owner.send_signal(end)
        owner.wait(timeout=30)
    finally:
        owner.kill()  # where the test fails, its servers are not to stay either
        owner.stdout.close()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == []
    assert list((tmp_path / "t").iterdir()) == []


def _passable(directory: Path) -> Path:
    """Pytest's directories are ours alone, and Postgres, as another user, has to get through to its own."""
    made = directory / "t"
    made.mkdir(mode=0o711)
    for parent in [directory, *directory.parents]:
        if parent == Path(tempfile.gettempdir()):
            break
        parent.chmod(0o711)
    return made
