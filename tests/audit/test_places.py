"""A run's directory goes with it, or with a later run; never with one that lives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from delayer.audit import spark
from delayer.audit.spark import Origin

_RUN = """
import sys
from pathlib import Path
from delayer.audit import places
with places.place(Path(sys.argv[1]), places.EXTRACT) as made:
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


def ended(process: subprocess.Popen[str]) -> None:
    process.communicate("")


def test_it_is_for_one_user_and_goes_at_the_end_whatever_happened(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), spark.scratch_directory(tmp_path, spark.SCRATCH) as made:
        assert made.stat().st_mode & 0o077 == 0
        (made / "file").write_text("x")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_goes_with_the_next_one(tmp_path: Path) -> None:
    dead, left = started(tmp_path)
    dead.kill()
    dead.communicate()
    assert (left / "messages" / "part").exists()
    with spark.scratch_directory(tmp_path, spark.SCRATCH) as made:
        assert not left.exists()
        assert sorted(path.name for path in tmp_path.iterdir()) == [made.name, f"{made.name}.lock"]


def test_a_living_run_keeps_its_own(tmp_path: Path) -> None:
    living, its = started(tmp_path)
    with spark.scratch_directory(tmp_path, spark.SCRATCH) as ours:
        assert spark.sweep(tmp_path) == []
        assert (its / "messages" / "part").exists()
        assert ours.exists()
    ended(living)
    assert list(tmp_path.iterdir()) == []


def test_what_is_of_another_machine_stays(tmp_path: Path) -> None:
    dead, left = started(tmp_path)
    dead.kill()
    dead.communicate()
    [lock] = tmp_path.glob("*.lock")
    before = lock.read_bytes()
    for content in (b"elsewhere", Origin("elsewhere", "m", "b").written(), b""):
        lock.write_bytes(content)
        assert spark.sweep(tmp_path) == []
        assert left.exists()
    lock.write_bytes(before)
    assert spark.sweep(tmp_path) == [left]


HERE = Origin("pod-0", "", "this boot")


@pytest.mark.parametrize(
    ("here", "other", "sees"),
    [
        (HERE, HERE, True),
        (HERE, Origin("pod-1", "", "this boot"), True),  # another container of this kernel: its locks are seen
        (HERE, Origin("pod-0", "", "another boot"), False),  # a pod of the same name on another node, alive perhaps
        (Origin("pod-0", "", ""), Origin("pod-0", "", ""), False),
        (Origin("db1", "abc", "new"), Origin("db1", "abc", "old"), True),  # the same machine, started again
        (Origin("db1", "abc", "new"), Origin("db2", "abc", "old"), False),  # one image on two machines
        (Origin("db1", "abc", "new"), Origin("db1", "def", "old"), False),
    ],
)
def test_whose_free_lock_means_that_it_is_dead(here: Origin, other: Origin, sees: bool) -> None:
    assert here.sees(other) is sees
    assert Origin.read(other.written()) == other


def test_a_run_says_where_it_is() -> None:
    here = Origin.here()
    assert here.host and here.boot
    assert here.sees(here)


def test_what_has_no_lock_is_not_ours_to_remove(tmp_path: Path) -> None:
    (tmp_path / "delayer-audit-mine").mkdir()
    (tmp_path / "delayer-audit-other.lock").mkdir()
    assert spark.sweep(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 2
