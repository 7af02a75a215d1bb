"""What is wrong with a benchmark's command line is told before anything is measured; an early end is told, too."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from bench import __main__ as bench
from bench import ending, given
from bench.figures import Result


@pytest.mark.parametrize(
    "line",
    [
        "--count 0", "--count -5", "--count x", "--backlog -1", "--sizes 0", "--sizes 512,", "--sizes 512,512",
        "--rates -2000", "--rates 2000;5000", "--repeats 0", "--steady-seconds 0", "--churn-seconds 0", "--repeat 2",
    ],
)  # fmt: skip
def test_numbers_that_measure_nothing_are_mistakes(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.arguments(line.split())
    assert ended.value.code == 2
    option, found = line.split()
    said = capsys.readouterr().err
    assert option in said
    assert found in said


def test_numbers_that_are_taken() -> None:
    line = ["--count", "1", "--sizes", "4096,512", "--backlog", "0", "--repeats", "1", "--rates", "7"]
    options = bench.options_of(bench.arguments(line))
    found = (options.count, options.sizes, options.backlog, options.repeats, options.rates)
    assert found == (1, (4096, 512), 0, 1, (7,))


def test_sections_come_in_their_order_with_those_they_need() -> None:
    assert bench.chosen("release, park") == ["ceilings", "park", "release"]
    assert bench.chosen("release", "ceilings") == ["release"]
    assert bench.chosen("", "churn,start") == [name for name in bench.SECTIONS if name not in ("churn", "start")]
    assert set(bench.SECTIONS) - set(bench.chosen("", quick=True)) == bench.TAKES_MINUTES


@pytest.mark.parametrize(
    ("only", "skip", "said"),
    [
        ("nix", "", r"--only: expected some of ceilings, .*; found nix"),
        ("", "churns", r"--skip: expected some of ceilings, .*; found churns"),
        ("churn", "churn", "none left"),
    ],
)
def test_sections_that_are_not_there(only: str, skip: str, said: str) -> None:
    with pytest.raises(given.Mistake, match=said):
        bench.chosen(only, skip)


def test_a_file_is_tried_before_an_hour_is_spent_on_it(tmp_path: Path) -> None:
    new, old = tmp_path / "new" / "result.json", tmp_path / "old.json"
    old.write_text("old")
    assert given.writable("--output", new) == new
    assert not new.exists()
    given.writable("--output", old)
    assert old.read_text() == "old"
    for wrong in (tmp_path, old / "result.json"):
        with pytest.raises(given.Mistake, match="--output: expected a file that can be written; found"):
            given.writable("--output", wrong)
    with pytest.raises(given.Mistake, match="--charts: expected a directory"):
        given.directory("--charts", old)


@pytest.mark.parametrize("stored", ["", "{}", "[]", '{"about": 1}', '{"about": {}, "figures": [{"rows": 1}]}', "\xff"])
def test_what_is_no_result_is_said_in_a_line(tmp_path: Path, stored: str) -> None:
    path = tmp_path / "some.json"
    path.write_text(stored, encoding="latin-1")
    with pytest.raises(given.Mistake, match=r"some\.json: expected a result .*; found something else"):
        given.result(path)
    with pytest.raises(given.Mistake, match="found No such file"):
        given.result(tmp_path / "other.json")
    Result({"kind": "full"}).save(path)
    assert given.result(path).about == {"kind": "full"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_a_run_clean_up(number: signal.Signals) -> None:
    removed: list[str] = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), number)
            await asyncio.Event().wait()
        finally:
            removed.append("directory")

    with pytest.raises(ending.Ended, match=number.name) as ended:
        ending.run(work())
    assert removed == ["directory"]
    assert ended.value.exit_code == 128 + number


def test_a_run_that_comes_to_its_end() -> None:
    async def work() -> int:
        return 7

    assert ending.run(work()) == 7
