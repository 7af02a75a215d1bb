"""The modules that a command loads at its start: an operator waits for them each time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

NOWHERE = ("--broker-url", "amqp://127.0.0.1:1", "--store-url", "postgresql://127.0.0.1:1/nothing")
TOLD = """
import atexit, sys
atexit.register(lambda: print(*sys.modules, file=sys.stderr, flush=True))
from delayer.cli.main import main
main()
"""
SLOW = frozenset(
    {
        "aio_pika", "aiormq", "alembic", "asyncmy", "jinja2", "numpy", "pandas", "prometheus_client",
        "pyarrow", "pyspark", "sqlalchemy", "starlette", "uvicorn", "uvloop",
    }
)  # fmt: skip
"""Each takes between 20 and 500 ms."""
LOGS = {"structlog", "rich.console"}
DAEMON = {"http", "http.client", "delayer.core.plan", "delayer.daemon.wiring", "delayer.release.loop"}
STATUS = SLOW | DAEMON | LOGS
STORE = STATUS | {"pamqp", "delayer.amqp.connection", "delayer.config.topology"}
ANY = STORE | {"rich", "asyncio", "asyncpg", "pydantic", "delayer.config"}


def loaded(tmp_path: Path, *arguments: str, expect: int = 3) -> frozenset[str]:
    """The modules loaded when the command ends."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("DELAYER_", "COV_"))}
    done = subprocess.run(
        [sys.executable, "-c", TOLD, *arguments],
        capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path, env=environ,
    )  # fmt: skip
    assert done.returncode == (0 if arguments == ("--version",) else expect), done.stderr
    return frozenset(done.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "never"),
    [
        (("--version",), ANY),
        ((*NOWHERE, "list"), STORE),
        ((*NOWHERE, "list", "--json", "--delay-key", "k"), STORE),
        ((*NOWHERE, "show", "id:1@2"), STORE),
        ((*NOWHERE, "cancel", "id:1@2"), STORE),
        ((*NOWHERE, "reschedule", "id:1@2", "--by", "1h"), STORE),
        ((*NOWHERE, "held", "list"), STORE),
        ((*NOWHERE, "audit-log"), STORE),
        ((*NOWHERE, "db", "current"), STORE - LOGS),
        ((*NOWHERE, "status"), STATUS),
    ],
    ids=lambda value: " ".join(value[-3:]).removeprefix(NOWHERE[-1]) if isinstance(value, tuple) else "",
)
def test_a_reading_command_loads_no_slow_library(
    tmp_path: Path, arguments: tuple[str, ...], never: frozenset[str]
) -> None:
    assert not loaded(tmp_path, *arguments) & never


def test_topology_loads_the_driver(tmp_path: Path) -> None:
    """It needs the driver, so this shows that the measure works."""
    assert {"delayer.cli.main", "aio_pika", "structlog"} <= loaded(tmp_path, *NOWHERE, "topology", "verify")
