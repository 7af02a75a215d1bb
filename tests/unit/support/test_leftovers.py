"""What a failed test leaves open fails no other test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
TESTS = """
import gc
import socket

def test_that_fails():
    left_open = socket.socket()
    assert not left_open

def test_of_something_else():
    gc.collect()
"""


def test_only_the_test_that_fails_is_reported(tmp_path: Path) -> None:
    (tmp_path / "test_two.py").write_text(TESTS)
    words = "-p tests.conftest -p no:cacheprovider -W error -q --rootdir . test_two.py"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words.split()],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "1 failed, 1 passed" in done.stdout.splitlines()[-1], done.stdout + done.stderr
