"""The daemon reads the headers built by delayer.headers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from delayer import headers
from delayer.core.delay_headers import (
    CANCEL,
    DELAY,
    DELIVER_AT,
    KEY,
    KEY_CEILING,
    KEY_MODE,
    read_delay_ms,
    read_instant_ms,
)
from delayer.core.message import REPLACE, KeyMode
from delayer.core.plan import Mode, Park, Policy, Route
from tests.support.planning import decide, request


@pytest.mark.parametrize(
    ("wait", "milliseconds"), [(timedelta(0), 0), (timedelta(microseconds=1), 1), (timedelta(days=300), 25_920_000_000)]
)
def test_a_delay_is_rounded_up_to_milliseconds(wait: timedelta, milliseconds: int) -> None:
    made = headers.delay(wait)
    assert read_delay_ms(made[DELAY.decode()]) == milliseconds


@pytest.mark.parametrize(
    ("due", "milliseconds"),
    [
        (datetime(2026, 11, 24, 12, 0, 0, 1, tzinfo=UTC), 1_795_521_600_001),
        (datetime(2026, 11, 24, 14, tzinfo=timezone(timedelta(hours=2))), 1_795_521_600_000),
    ],
)
def test_an_instant_is_in_epoch_milliseconds(due: datetime, milliseconds: int) -> None:
    made = headers.at(due)
    assert read_instant_ms(made[DELIVER_AT.decode()]) == milliseconds


def test_keys_have_the_names_that_the_daemon_reads() -> None:
    assert headers.key("k") | headers.cancel("c") == {KEY.decode(): "k", CANCEL.decode(): "c"}


@pytest.mark.parametrize(
    ("made", "mode"),
    [
        (headers.key("k"), REPLACE),
        (headers.key("k", keep=True), KeyMode(keep=True)),
        (headers.key("k", debounce=timedelta(seconds=1, microseconds=1)), KeyMode(ceiling_ms=1_001)),
        (headers.key("k", debounce=timedelta(0)), KeyMode(ceiling_ms=0)),
    ],
)
def test_the_daemon_reads_the_modes_of_keys(made: dict[str, object], mode: KeyMode) -> None:
    assert made.keys() <= {KEY.decode(), KEY_MODE.decode(), KEY_CEILING.decode()}
    asked = request(b"in", b"r", {name.encode(): value for name, value in made.items()})
    plan = decide(asked, Policy(Mode.STORE, {b"in": Route(b"in", b"out")}, max_delay_ms=1), 0)
    assert isinstance(plan, Park)
    assert (plan.key, plan.mode) == (b"k", mode)


@pytest.mark.parametrize(
    ("make", "value"),
    [
        (headers.at, datetime(2030, 1, 1)),  # noqa: DTZ001 - the mistake that is tested
        (headers.delay, timedelta(seconds=-1)),
        (headers.key, ""),
        (headers.cancel, "ä" * 128),
        (lambda ceiling: headers.key("k", debounce=ceiling), timedelta(seconds=-1)),
        (lambda ceiling: headers.key("k", keep=True, debounce=ceiling), timedelta(seconds=1)),
    ],
    ids=["naive datetime", "negative delay", "empty key", "long key", "negative ceiling", "two modes"],
)
def test_a_value_that_the_daemon_would_refuse_raises(make: Callable[[Any], object], value: object) -> None:
    with pytest.raises(ValueError, match="expected"):
        make(value)


def test_the_module_needs_the_standard_library_only() -> None:
    without_packages = [sys.executable, "-S", "-c", "import delayer.headers"]
    subprocess.run(without_packages, check=True, cwd=Path(headers.__file__).parents[1])
