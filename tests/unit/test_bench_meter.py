"""Whose CPU a run's figures count."""

from __future__ import annotations

import subprocess
import sys

BUSY = "import time; until = time.process_time() + 0.3\nwhile time.process_time() < until: pass"
LOOK = """
import os, subprocess, sys, time
from bench import meter
if sys.argv[1] == "adopting":
    meter.adopt_orphans()
before = meter.cpu_seconds(meter.tree(os.getpid()))
# One that is left behind by its parent, and ends later than that.
left = subprocess.run(["sh", "-c", '"$@" >/dev/null & echo $!', "sh", sys.executable, "-c", sys.argv[2]], stdout=-1)
place = f"/proc/{int(left.stdout)}/stat"
while os.path.exists(place) and open(place).read().rpartition(")")[2].split()[0] != "Z":
    time.sleep(0.01)
print(meter.cpu_seconds(meter.tree(os.getpid())) - before)
"""


def used(how: str) -> float:
    told = subprocess.run([sys.executable, "-c", LOOK, how, BUSY], capture_output=True, text=True, check=True)
    return float(told.stdout)


def test_what_children_leave_behind_is_ours() -> None:
    assert used("adopting") > 0.25  # what two clocks say differs by a tick
    assert used("as it was") < 0.25  # else the test shows nothing
