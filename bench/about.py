"""Where, when and of what a run's figures are; and the same in words."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from bench.run import Options

HERE = Path(__file__).parent
UNTOLD = ("quick",)
"""Options that a run's kind says already."""


def provenance() -> dict[str, Any]:
    """When, by which command, from which revision, on which machine."""
    git = ["git", "-C", str(HERE)]
    revision = subprocess.run([*git, "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    memory = psutil.virtual_memory().total / 2**30
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.orig_argv[1:]),
        "revision": revision.stdout.strip(),
        "machine": f"{os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()} {platform.release()}",
    }


def about(options: Options, versions: dict[str, str]) -> dict[str, Any]:
    """What stands at the head of a result."""
    return provenance() | {
        "kind": "quick" if options.quick else "full",
        "versions": {"Python": platform.python_version(), **versions},
        "cores_of_other_programs": {},
        "options": asdict(options),
        "rates_between": "10 % and 90 % of the count",
    }


def when(told: dict[str, Any]) -> str:
    """The instant of its start, to the minute."""
    return f"{datetime.fromisoformat(told['at']):%Y-%m-%d %H:%M} UTC" if told.get("at") else "an unknown time"


def changed(told: dict[str, Any]) -> str:
    """The options that were not those of a full run, which are told in brackets."""
    usual, found = asdict(Options()), told.get("options", {})
    parts = [
        f"{name.replace('_', ' ')} {_value(value)} ({_value(usual[name])})"
        for name, value in found.items()
        if name in usual and name not in UNTOLD and _value(value) != _value(usual[name])
    ]
    return ", ".join(parts) or "as usual"


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "+".join(_value(one) for one in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}"


def disturbance(told: dict[str, Any]) -> str:
    """What other programs took of the cores at most, by section."""
    by_section = told.get("cores_of_other_programs") or {}
    if not by_section:
        return "not measured"
    name = max(by_section, key=lambda one: by_section[one])
    return f"{by_section[name]:.2f} at most (*{name}*)"


def minutes(told: dict[str, Any]) -> str:
    seconds = told.get("seconds") or {}
    return f"{sum(seconds.values()) / 60:.0f} min" if seconds else "not said"
