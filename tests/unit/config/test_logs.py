"""The log: the form of a line, no secrets in it, and a documented meaning for every event."""

from __future__ import annotations

import ast
import asyncio
import io
import json
import logging
import re
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import structlog

import delayer
from delayer.config import logs
from delayer.config.logs import ELSEWHERE, MOST_KINDS, configure
from delayer.core.backoff import LINES
from delayer.core.readable import readable
from tests.support.logged import logging_as_it_was

LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """A stream to log to; the fixture restores the logging settings afterwards."""
    with logging_as_it_was():
        yield io.StringIO()
    for library in (*logs._LIBRARIES, *logs._TALKATIVE):
        logging.getLogger(library).setLevel(logging.NOTSET)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_the_details_of_the_standard_library_are_fields(stream: io.StringIO) -> None:
    configure("json", "info", stream)
    logging.getLogger("delayer.store").info("partition made", extra={"partition": "p\n"})
    (line,) = lines(stream)
    assert {name: line[name] for name in ("level", "event", "logger", "partition")} == {
        "level": "info",
        "event": "partition made",
        "logger": "delayer.store",
        "partition": "p\\n",
    }


def test_each_line_is_one_json_object(stream: io.StringIO) -> None:
    configure("json", "info", stream)
    structlog.get_logger("delayer.release.loop").info("message held", id=7, key=b"orders.\xff\n", route=b"a", n=None)
    (line,) = lines(stream)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", line.pop("timestamp"))
    assert line == {
        "level": "info",
        "event": "message held",
        "logger": "delayer.release.loop",
        "id": 7,
        "key": "orders.\\xff\\n",
        "route": "a",
        "n": None,
    }


def test_level_and_format_change_live(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    log = structlog.get_logger("delayer.x")
    configure("json", "warning", stream)
    log.info("one")
    configure("auto", "debug", stream)
    log.debug("two")
    configure("console", "error", stream)
    log.warning("three")
    log.error("four", key="value")
    first, second = stream.getvalue().splitlines()
    assert json.loads(first)["event"] == "two"
    assert "four" in second
    assert "key=value" in second
    assert "\x1b" not in second, "no colours without a terminal"
    monkeypatch.setattr(stream, "isatty", lambda: True)
    configure("auto", "info", stream)
    log.info("five")
    assert "\x1b" in stream.getvalue()


def test_libraries_log_in_the_same_format_and_only_warnings(stream: io.StringIO) -> None:
    configure("json", "debug", stream)
    logging.getLogger("aio_pika.robust").info("chatter")
    logging.getLogger("aiormq.connection").debug("Sending a frame with the login in it")
    logging.getLogger("asyncpg.pool").warning("Failed to restore the pool connection floor", exc_info=True)
    logging.getLogger("alembic.runtime.migration").warning("to %s", "amqp://u:hunter2@h")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old\nways", stacklevel=1)
    first, second = lines(stream)
    assert first["event"] == "to amqp://u:***@h"
    assert (first["level"], first["logger"]) == ("warning", "alembic.runtime.migration")
    assert second["logger"] == "py.warnings"
    assert "old\\nways" in second["event"]


@pytest.mark.parametrize("form", ["json", "console"])
@pytest.mark.parametrize("foreign", [False, True])
def test_no_secret_and_no_forged_line(form: Any, foreign: bool, stream: io.StringIO) -> None:
    configure(form, "info", stream)
    evil = 'x\r\n{"event": "forged"}\u2028\x1b[2J amqp://user:hunter2@host/ password=hunter2'
    try:
        raise ValueError(evil)  # noqa: TRY301 - a real traceback is wanted
    except ValueError:
        if foreign:
            logging.getLogger("some.library").exception(evil)
        else:
            structlog.get_logger("delayer.x").exception(
                evil, text=evil, raw=evil.encode(), nested={"k": [evil]}, error=ValueError(evil), also=Path(evil)
            )
    text = stream.getvalue()
    assert "hunter2" not in text
    assert "user:***@host" in text
    assert not {"\r", "\x1b", "\u2028"} & set(text)
    assert not any(line.startswith('{"event": "forged"}') for line in text.splitlines())
    if form == "json":
        (line,) = lines(stream)
        assert "Traceback" in line["exception"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("plain", "plain"), ("Grüße, 日本", "Grüße, 日本"), ("tab\tnull\0", "tab\\tnull\\x00"),
        ("\u202egnp.exe", "\\u202egnp.exe"), ("\x85\x9b", "\\x85\\x9b"), ("\ud800", "\\ud800"), (b"key", "key"),
        ("Grüße".encode(), "Grüße"), (b"\x00\xff", "\\x00\\xff"), (b"x" * 600, "x" * 512 + "… (88 more bytes)"),
        ("x" * 20_000, "x" * 16_384 + "… (3616 more characters)"),
        (b"http://host:80/" + b"x" * 600, "http://host:80/" + "x" * 497 + "… (103 more bytes)"),
        (b"http://host:80/" + b"x" * 497 + b" @", "http://host:80/" + "x" * 497 + "… (2 more bytes)"),
        (b"amqp://u:" + b"hunter2" * 100 + b"@host", "amqp://u:***… (202 more bytes)"),
        ("x " * 8_000 + "amqp://u:" + "hunter2" * 100 + "@host", "x " * 8_000 + "amqp://u:***… (330 more characters)"),
    ],
)  # fmt: skip
def test_readable(value: str | bytes, expected: str) -> None:
    assert readable(value) == expected


def test_a_flood_of_messages_logs_the_first_lines_of_each_kind_and_counts_the_rest(
    stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    configure("json", "info", stream)
    log = structlog.get_logger("delayer.x")
    for n in range(1_000):
        log.warning("message refused", message_id=b"%d" % n, exchange=b"a")
        log.warning("message held", id=n, exchange=b"b", more=2)
        log.info("ready")
    now = 110.0
    log.warning("row rejected", id=7, lane=3)
    logs._limited.report()
    log.warning("message held", id=7, exchange=b"b")
    found = lines(stream)
    counted = Counter((one["event"], one.get("exchange")) for one in found)
    assert counted["message refused", "a"] == LINES
    assert counted["message held", "b"] == LINES + 1, "a new window"
    assert counted["ready", None] == 1_000, "only lines about messages"
    left_out = {(one["of"], one["place"], one["lines"]) for one in found if one["event"] == "log lines left out"}
    assert left_out == {("message refused", "a", 1_000 - LINES), ("message held", "b", 3_000 - LINES)}


async def test_the_end_of_a_flood_is_reported_without_another_line(
    stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "call_later", lambda _, *call: loop.call_soon(*call))
    monkeypatch.setattr(logs, "_limited", logs._Limited())
    configure("json", "info", stream)
    for n in range(LINES + 5):
        structlog.get_logger("delayer.x").warning("message held", id=n)
    await asyncio.sleep(0)
    assert lines(stream)[-1]["lines"] == 5


async def test_a_timer_that_runs_late_does_not_end_the_next_window(
    stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    timers: list[asyncio.Handle] = []
    loop, now = asyncio.get_running_loop(), 100.0
    monkeypatch.setattr(loop, "call_later", lambda _, *call: timers.append(asyncio.Handle(call[0], call[1:], loop)))
    monkeypatch.setattr("time.monotonic", lambda: now)
    monkeypatch.setattr(logs, "_limited", logs._Limited())
    configure("json", "info", stream)
    for now in (100.0, 110.0, 110.5, 120.0):
        for n in range(2 * LINES):
            structlog.get_logger("delayer.x").warning("message held", id=n)
        if now == 110.0:
            timers[0]._run()
    timers[1]._run()
    assert Counter(one["event"] for one in lines(stream)) == {"message held": 3 * LINES, "log lines left out": 2}
    timers[2]._run()
    assert [one["lines"] for one in lines(stream) if "lines" in one] == [LINES, 3 * LINES, LINES]


def test_a_flood_from_many_exchanges_is_bounded(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    limit, passed = logs._Limited(), 0
    for n in range(50_000):
        with suppress(structlog.DropEvent):
            limit(None, "warning", {"event": "message held", "id": n, "exchange": n % 5_000})
            passed += 1
    assert passed == LINES * (MOST_KINDS + 1)
    configure("json", "info", stream)
    limit.report()
    [line] = lines(stream)
    assert (line["of"], line["place"]) == ("message held", ELSEWHERE)
    assert line["lines"] == 50_000 - 10 * MOST_KINDS - LINES


def events_used() -> Iterator[tuple[str, int, ast.Call]]:
    """Every ``log.<level>(…)`` in the package."""
    package = Path(delayer.__file__).parent
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LEVELS:
                owner = node.func.value
                name = (
                    owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
                )
                if name.strip("_") in ("log", "logger"):
                    yield str(path.relative_to(package)), node.lineno, node


def test_the_page_of_events_has_every_event_and_no_other() -> None:
    page = (Path(__file__).parents[3] / "docs" / "events.md").read_text()
    listed = set(re.findall(r"^\| `(.+)` \| .+ \|$", page, re.MULTILINE))
    used = set()
    for path, line, call in events_used():
        name = call.args[0] if call.args else None
        assert isinstance(name, ast.Constant), f"{path}:{line}: an event's name is a constant, its details are keywords"
        used.add(name.value)
    assert used == listed
    assert all(re.fullmatch(r"[a-z][a-z ._-]+", name) for name in listed)


GAP = """
import sys
from delayer.config import logs
import structlog
logs.log_in_background()
logs.configure("json", "info")
log = structlog.get_logger("delayer.test")
for number in range(20_000):
    log.info("stopped", number=number)
print("written", flush=True)
sys.stdin.read()
logs._background.queue.join()
log.info("ready")
logs.configure("json", "error")
log.info("ready")
logs.flush_background()
"""


def test_a_log_that_is_not_read_is_bounded_and_the_gap_is_reported() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", GAP], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin and process.stdout and process.stderr
        assert process.stdout.readline() == b"written\n", "it did not wait for a reader"
        process.stdin.close()
        events = [json.loads(line) for line in process.stderr]
        assert process.wait(20) == 0
    kept = next(at for at, one in enumerate(events) if one["event"] == "log lines dropped")
    assert [one["number"] for one in events[:kept]] == list(range(kept))
    assert events[kept]["lines"] == 20_000 - kept
    assert [one["event"] for one in events[kept + 1 :]] == ["ready"]
