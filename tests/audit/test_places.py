"""A run's directory goes with it, or with a later run; never with one that lives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from delayer.audit import spark

_RUN = """
import sys
from pathlib import Path
from delayer.audit import spark
with spark.scratch_directory(Path(sys.argv[1]), spark.EXTRACT) as made:
    (made / "messages").mkdir()
    (made / "messages" / "part").write_text("keys and headers")
    print(made, flush=True)
    sys.stdin.read()
"""


def started(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", _RUN, str(parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_it_is_for_one_user_and_goes_at_the_end_whatever_happened(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), spark.scratch_directory(tmp_path, spark.SCRATCH) as made:
        assert made.stat().st_mode & 0o077 == 0
        (made / "file").write_text("x")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_the_next_run_removes_the_directory_of_a_killed_one(tmp_path: Path) -> None:
    dead, left = started(tmp_path)
    dead.kill()
    dead.communicate()
    assert (left / "messages" / "part").exists()
    with spark.scratch_directory(tmp_path, spark.EXTRACT) as made:
        assert list(tmp_path.iterdir()) == [made]


def test_a_living_run_keeps_its_own(tmp_path: Path) -> None:
    living, its = started(tmp_path)
    with spark.scratch_directory(tmp_path, spark.EXTRACT) as ours:
        assert (its / "messages" / "part").exists()
        assert ours.exists()
    living.communicate("")
    assert list(tmp_path.iterdir()) == []


def test_directories_of_another_boot_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that shares the directory may be at work there: its locks are not seen from here."""
    dead, left = started(tmp_path)
    dead.kill()
    dead.communicate()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(spark, "_boot", lambda: "elsewher")
        with spark.scratch_directory(tmp_path, spark.EXTRACT):
            assert left.exists()
    with spark.scratch_directory(tmp_path, spark.EXTRACT):
        assert not left.exists()
