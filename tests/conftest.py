"""Servers for tests, and coroutine tests.

Servers are started by the first test that needs one; the unit tests alone start none.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hypothesis import HealthCheck, settings

from tests.support import reworded
from tests.support.servers import Postgres, RabbitMQ

DEADLINE_SECONDS = 120.0
CLOSE_SECONDS = 30.0
"""A test's loop may take this long to close."""
WITH_SPARK = "tests/audit/"
OWN_JVMS = "tests/audit/test_killed.py"
"""Whose tests start a JVM each."""
# Tests that run in `make test-slow` only. One list, because the sum of their times must fit `make test` (ten minutes).
SLOW = (
    WITH_SPARK,
    "tests/acceptance/test_audit_page.py",
    "tests/acceptance/test_drain.py",
    "tests/acceptance/test_ended_connections.py",
    "tests/acceptance/test_examples.py",
    "tests/acceptance/test_frameworks.py",
    "tests/acceptance/test_http.py",
    "tests/acceptance/test_page.py",
    "tests/acceptance/test_switch_under_load.py",
    "tests/acceptance/test_systemd.py",
    "tests/acceptance/test_takeover.py",
    "tests/faults/test_compact_traffic.py",
    "tests/faults/test_crash_drain.py",
    "tests/faults/test_crash_import.py",
    "tests/faults/test_crash_segments.py",
    "tests/faults/test_crash_standby.py",
    "tests/faults/test_damaged_store.py",
    "tests/faults/test_every_fault.py",
    "tests/faults/test_failover.py",
    "tests/faults/test_features_under_faults.py",
    "tests/faults/test_harness.py",
    "tests/faults/test_hostile.py",
    "tests/faults/test_keys_in_order.py",
    "tests/faults/test_overload.py",
    "tests/faults/test_sql_under_faults.py",
    "tests/faults/test_store_fails_over.py",
    "tests/integration/test_import_",
    "tests/integration/test_restoring.py",
    "tests/integration/test_rights_daemon.py",
    "tests/integration/test_store_segments.py",
    "tests/integration/test_store_shrinking.py",
    "tests/simulation/",
)


# The JVMs of tests end before C2 pays off. With this option the first audit of a JVM took 24 s of processor time, and
# more than 60 s without it. Commands inherit the variable.
os.environ["SPARK_SUBMIT_OPTS"] = "-XX:TieredStopAtLevel=1"

# No deadline per example: three workers and their servers share two cores, so its time means nothing.
settings.register_profile("shared machine", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")


def in_one_jvm(nodeid: str) -> bool:
    return nodeid.startswith(WITH_SPARK) and not nodeid.startswith(OWN_JVMS)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests run in one worker (`--dist loadfile`), and most of tests/audit too: one JVM is enough. Units start
    in the order of pytest_collection_modifyitems."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class OneJvm(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return WITH_SPARK if in_one_jvm(nodeid) else super()._split_scope(nodeid)

    config.option.loadscopereorder = False
    return OneJvm(config, log)


class Failed:
    """Writes the ids of failed tests to a file, a line each; the build server tries them once more, alone."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ids: dict[str, None] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._ids[report.nodeid] = None

    def pytest_sessionfinish(self) -> None:
        self._path.write_text("".join(f"{one}\n" for one in self._ids))


class Leftovers:
    """Collects what a failed test left open as soon as it is over: its ResourceWarnings would fail a later test."""

    def __init__(self) -> None:
        self._failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed |= report.failed

    def pytest_runtest_logfinish(self) -> None:
        if self._failed:
            self._failed = False
            for name in ("last_exc", "last_type", "last_value", "last_traceback"):  # pytest keeps the last failure.
                vars(sys).pop(name, None)
            hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
            gc.collect()
            sys.unraisablehook = hook


def pytest_configure(config: pytest.Config) -> None:
    path = os.environ.get("FAILED_TESTS")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Failed(Path(path)))
    config.pluginmanager.register(Leftovers())
    if not config.option.markexpr:  # a worker gets it from the controller: its own args_source is not meaningful
        named = config.args_source is pytest.Config.ArgsSource.ARGS
        config.option.markexpr = "not long" if named else "not long and not slow"
    if reworded.EVERYWHERE:
        reworded.reword()
        config.option.markexpr = f"({config.option.markexpr}) and not words"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many tests `.ci/run` had to try twice."""
    if path := os.environ.get("FLAKY_TESTS"):
        terminalreporter.write_line(f"flaky: {len(Path(path).read_text().splitlines())}")


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow tests. Begin with the longest unit, which would keep one worker busy after the others; the unit tests
    come last anyway, and are short."""
    for item in items:
        if item.nodeid.startswith(SLOW):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: not in_one_jvm(item.nodeid))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run each `async def` test in its own loop with a deadline; `@pytest.mark.deadline(seconds)` moves it.

    A call of the loop's exception handler (a task died unnoticed, a callback raised) also fails the test.
    """
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    marker = pyfuncitem.get_closest_marker("deadline")
    seconds = float(marker.args[0]) if marker else DEADLINE_SECONDS
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    unheard: list[dict[str, Any]] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
        try:
            async with asyncio.timeout(seconds) as limit:
                await pyfuncitem.obj(**arguments)
        except TimeoutError:
            if limit.expired():
                pytest.fail(f"took longer than {seconds:g} s; the traceback above shows where it waited")
            raise

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            try:
                runner.run(run())
            finally:
                # uvloop waits forever for a connection left open by a failed test. In that case, end the worker.
                faulthandler.dump_traceback_later(CLOSE_SECONDS, exit=True, file=sys.__stderr__)
    finally:
        faulthandler.cancel_dump_traceback_later()
    for context in unheard:
        error = context.get("exception")
        raise AssertionError(f"no code handled this error: {context['message']}: {error!r}") from error
    return True


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[RabbitMQ]:
    """One broker for all tests. A test that stops, kills or pauses a broker starts its own."""
    with RabbitMQ() as server:
        yield server


@pytest.fixture
def delaying(rabbitmq: RabbitMQ) -> RabbitMQ:
    """A broker that delays messages itself."""
    if not rabbitmq.delays_messages:
        pytest.skip(f"RabbitMQ {'.'.join(map(str, rabbitmq.version))} delays no messages itself: that begins with 4.4")
    return rabbitmq


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """One Postgres for all tests. A test that stops, kills or pauses Postgres starts its own."""
    with Postgres() as server:
        yield server


@pytest.fixture
def vhost_name(rabbitmq: RabbitMQ) -> Iterator[str]:
    """A fresh vhost."""
    name = rabbitmq.add_vhost()
    yield name
    rabbitmq.drop_vhost(name)


@pytest.fixture
def vhost(rabbitmq: RabbitMQ, vhost_name: str) -> str:
    """The amqp:// URL of a fresh vhost."""
    return rabbitmq.url(vhost_name)


@pytest.fixture(scope="session")
def template(postgres: Postgres) -> str:
    """The name of a database with our schema, to copy: an upgrade takes as long as many tests do."""
    return postgres.add_store()


@pytest.fixture
def database(postgres: Postgres, template: str) -> Iterator[str]:
    """The postgresql:// URL of a fresh database with our schema."""
    name = postgres.add_database(template=template)
    yield postgres.url(name)
    postgres.drop_database(name)


@pytest.fixture
def empty_database(postgres: Postgres) -> Iterator[str]:
    """The postgresql:// URL of a fresh database with nothing in it."""
    name = postgres.add_database()
    yield postgres.url(name)
    postgres.drop_database(name)
