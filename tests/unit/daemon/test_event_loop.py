"""The end of a loop waits for nobody beyond its time."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest
from structlog.testing import capture_logs

from delayer.daemon.app import run_loop

SHORT = 0.05


async def stubborn() -> None:
    """Does not heed being cancelled."""
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            continue


async def polite(farewells: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0)
        farewells.append("bye")


def test_the_result_and_the_error_of_main() -> None:
    async def seven() -> int:
        return 7

    async def fails() -> None:
        raise KeyError("main")

    assert run_loop(seven()) == 7
    with pytest.raises(KeyError, match="main"):
        run_loop(fails())


def test_tasks_left_over_say_goodbye() -> None:
    farewells: list[str] = []

    async def main() -> asyncio.Task[None]:
        task = asyncio.create_task(polite(farewells))
        await asyncio.sleep(0)
        return task

    with capture_logs() as events:
        assert run_loop(main()).cancelled()
    assert farewells == ["bye"]
    assert not events


def test_a_task_that_does_not_leave_is_named_and_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> str:
        asyncio.create_task(stubborn(), name="the stubborn one")  # noqa: RUF006  # nobody is to hold it
        await asyncio.sleep(0)
        return "done"

    began = time.monotonic()
    with capture_logs() as events, caplog.at_level(logging.ERROR):
        assert run_loop(main(), leave=SHORT) == "done"
    assert time.monotonic() - began < 100 * SHORT
    (event,) = events
    assert event["event"] == "tasks left behind"
    assert event["tasks"] == ["the stubborn one"]
    assert not caplog.records
