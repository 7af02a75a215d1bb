"""Whoever logs first finds the logs configured: on stderr, errors only, and nothing between a command's answer."""

from __future__ import annotations

import subprocess
import sys

import pytest

FIRST = {
    "a module of ours": "import structlog; log = structlog.get_logger('ours'); log.info('low'); log.error('high')",
    "a library": "import logging; log = logging.getLogger('theirs'); log.info('low'); log.error('high')",
    "telemetry itself": "from delayer import telemetry; import structlog; structlog.get_logger('ours').error('high')",
    "one that was bound before": "import structlog; log = structlog.get_logger('ours').bind(a=1); log.error('high');"
    " log.info('low')",
    "one whose handlers somebody took": "import structlog, logging; logging.getLogger().handlers[:] = [];"
    " log = structlog.get_logger('ours'); log.info('low'); log.error('high')",
    "one after the other": "import structlog, logging; logging.getLogger('theirs').error('high');"
    " structlog.get_logger('ours').info('low')",
}


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("before", ["", "import structlog; "], ids=["", "loaded before"])
def test_what_is_logged_goes_to_stderr(first: str, before: str) -> None:
    program = (
        f"{before}from delayer import late_logs; late_logs.arrange(); late_logs.arrange(); {FIRST[first]}; print(1)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "1\n"
    assert "high" in done.stderr
    assert "low" not in done.stderr


def test_nobody_loads_structlog_by_it() -> None:
    program = "import sys; from delayer import late_logs; late_logs.arrange(); print('structlog' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"
