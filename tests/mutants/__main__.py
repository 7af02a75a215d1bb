"""`make mutants`: break one line of the program at a time, and check that its tests notice.

Each mutant of tests/mutants/listed.py is applied to a copy of the tree. Its tests run there with -x, and the line is
put back. Exit code 1 if a mutant survives, if its text is not found, or if a test fails without it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.listed import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
LONGEST_SECONDS = 600
"""A mutant may make its tests hang, which counts as killed."""
PASSED, FAILED = 0, 1


def copied(to: Path) -> None:
    """Copy the files that git knows or would add, without build output."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)


def ran(tree: Path, tests: Sequence[str]) -> int | None:
    """The exit code of pytest in ``tree``; None if it did not finish in time."""
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "-x", "-p", "no:cacheprovider", "-m", "", *tests]
    # Programs that a test starts import the copy too, not the tree that the virtual environment was made for.
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, timeout=LONGEST_SECONDS, capture_output=True, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    return done.returncode


def judged(tree: Path, mutant: Mutant) -> str:
    """ "killed", or a message that names the problem."""
    file = tree / mutant.file
    before = file.read_text() if file.is_file() else ""
    if before.count(mutant.text) != mutant.times:
        return f"its text is there {before.count(mutant.text)} times in {mutant.file}, expected {mutant.times}"
    file.write_text(before.replace(mutant.text, mutant.replacement))
    try:
        code = ran(tree, mutant.tests)
    finally:
        file.write_text(before)
    if code in (FAILED, None):
        return "killed"
    return "SURVIVED" if code == PASSED else f"pytest could not run its tests (exit code {code})"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these, or those that begin so")
    parser.add_argument("--list", action="store_true", help="name them, and run nothing")
    parser.add_argument("--without-baseline", action="store_true", help="do not run the tests without a mutant first")
    asked = parser.parse_args()
    chosen = [one for one in MUTANTS if not asked.names or one.name.startswith(tuple(asked.names))]
    if asked.list:
        print(*(one.name for one in chosen), sep="\n")
        return 0
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        tree = Path(directory)
        copied(tree)
        every = sorted({test for one in chosen for test in one.tests})
        if not asked.without_baseline and (code := ran(tree, every)) != PASSED:
            print(f"without a mutant the tests end with {code}: nothing can be said")
            return 1
        for one in chosen:
            began = time.monotonic()
            found = judged(tree, one)
            wrong += found != "killed"
            print(f"{one.name:40} {found} ({time.monotonic() - began:.0f} s)", flush=True)
    print(f"{len(chosen)} mutants, {len(chosen) - wrong} killed")
    return 1 if wrong or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
