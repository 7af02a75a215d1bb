"""Beat's own file, and settings modules. `beat/celerybeat-schedule` was written by `celery.beat.PersistentScheduler` of
Celery 5.7.0, with `dbm.dumb`, which every Python reads."""

from __future__ import annotations

import os
import pickle
import shelve
import sys
from dbm import dumb
from importlib.util import find_spec
from pathlib import Path
from uuid import uuid4

import pytest
from click.testing import CliRunner

from delayer.cli.main import cli
from delayer.core.message import Target
from delayer.core.units import MINUTE_MS
from delayer.imports import beat_files
from delayer.imports.beat import translate_beat
from delayer.imports.beat_files import BeatSource, BeatUnreadable, read_beat_file, read_beat_settings
from delayer.imports.translation import Translation
from delayer.schedule.rhythm import Cron, Every

WRITTEN = Path(__file__).parent / "beat" / "celerybeat-schedule"
LAST_RUN = 1_795_995_302_567
SETTINGS = """
from celery.schedules import crontab
from datetime import timedelta
timezone = "America/New_York"
task_default_queue = "shop"
beat_schedule = {
    "report": {"task": "shop.report", "schedule": crontab(minute=0, hour="*/2", day_of_month="1"), "args": (1,)},
    "often": {"task": "shop.often", "schedule": timedelta(minutes=1), "options": {"queue": "fast"}},
}
"""


def translate(source: BeatSource) -> Translation:
    result = Translation(1_772_000_000_000, uuid4, prefix="shop-")
    translate_beat(result, source.entries, zone=source.zone or "", queue=source.queue or "celery")
    return result


def test_beat_s_own_file() -> None:
    source = read_beat_file(WRITTEN)
    assert (source.zone, source.queue) == ("Europe/Berlin", None)
    found = translate(source)
    there = {one.name: one for one in found.schedules}
    assert there["shop-report"].rhythm == Cron("0 7 * * mon-fri", "Europe/Berlin")
    assert there["shop-report"].target == Target(b"", b"reports")
    assert there["shop-report"].body.startswith(b'[[16, "x"], {}, ')
    assert there["shop-relative"].rhythm == Every(60 * MINUTE_MS)
    delta, seconds = there["shop-delta"].rhythm, there["shop-every-10-s"].rhythm
    assert isinstance(delta, Every)
    assert isinstance(seconds, Every)
    assert (delta.period_ms, seconds.period_ms) == (15 * MINUTE_MS, 10_000)
    assert delta.first_ms == LAST_RUN, "it goes on from its last run"
    assert there["shop-celery.backend_cleanup"].rhythm == Cron("0 4 * * *", "Europe/Berlin")
    [missing] = found.untranslated
    assert missing.where == "sun"
    assert "'sunrise'" in missing.why or '"sunrise"' in missing.why


@pytest.mark.parametrize(("name", "module"), [("gnu", "_gdbm"), ("ndbm", "_dbm"), ("sqlite3", "dbm.sqlite3")])
def test_a_file_of_another_kind_is_read_where_python_has_its_module(name: str, module: str) -> None:
    """The real scheduler wrote these, too: on Debian 12 with python3-gdbm, and by Python 3.13."""
    file = WRITTEN.with_name(name)
    if find_spec(module):
        source = read_beat_file(file)
        assert source.zone == "Europe/Berlin"
        there = {one.name: one for one in translate(source).schedules}
        assert there["shop-report"].rhythm == Cron("0 7 * * mon-fri", "Europe/Berlin")
    else:
        with pytest.raises(
            BeatUnreadable, match=f"found one of dbm.{name}, a module that this Python lacks. Next: run"
        ):
            read_beat_file(file)


@pytest.mark.parametrize("is_installed", [False, True])
def test_a_settings_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_installed: bool) -> None:
    file = tmp_path / "celeryconfig.py"
    file.write_text(SETTINGS)
    if not is_installed:
        monkeypatch.setattr(beat_files, "find_spec", lambda _name: None)
        for name in [name for name in sys.modules if name.partition(".")[0] == "celery"]:
            monkeypatch.delitem(sys.modules, name)
    source = read_beat_settings(file)
    assert is_installed or not {name for name in sys.modules if name.startswith("celery")}
    assert (source.zone, source.queue) == ("America/New_York", "shop")
    report, often = translate(source).schedules
    assert (report.rhythm, report.target) == (Cron("0 */2 1 * *", "America/New_York"), Target(b"", b"shop"))
    assert (often.name, often.target) == ("shop-often", Target(b"", b"fast"))


@pytest.mark.parametrize(("lines", "is_utc"), [("", True), ("enable_utc = True", True), ("enable_utc = False", False)])
def test_a_host_s_own_zone_is_not_utc(tmp_path: Path, lines: str, is_utc: bool) -> None:
    module = tmp_path / "celeryconfig.py"
    module.write_text(f"beat_schedule = {{}}\n{lines}\n")
    assert read_beat_settings(module).is_utc is is_utc
    file = tmp_path / "schedule"
    with shelve.open(str(file)) as shelf:  # As the real beat writes it.
        shelf["entries"], shelf["utc_enabled"] = {}, is_utc
    assert read_beat_file(file).is_utc is is_utc
    given = ["schedule", "import", "beat", str(module), "--dry-run"]
    result = CliRunner().invoke(cli, ["--mode", "store", "--set", "store.url=postgresql:///nowhere", *given])
    assert ("--zone: expected the zone of beat's host" in result.output) is not is_utc


@pytest.mark.parametrize("text", ["", "beat_schedule = 1", "import nowhere", "raise SystemError('no')", "1 +"])
def test_a_module_without_entries_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "settings.py"
    file.write_text(text)
    with pytest.raises(BeatUnreadable, match=r"settings.py: expected .*found"):
        read_beat_settings(file)


class Forged:
    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> object:
        return os.mkdir, (str(self.made),)


class Getattr:
    def __reduce__(self) -> object:
        return getattr, (int, "from_bytes")


def write(path: Path, entries: object) -> None:
    with shelve.Shelf(dumb.open(str(path), "n")) as shelf:
        shelf["entries"] = entries


def test_a_forged_file_runs_nothing(tmp_path: Path) -> None:
    made = tmp_path / "made"
    write(tmp_path / "forged", {"evil": Forged(made)})
    found = translate(read_beat_file(tmp_path / "forged"))
    assert not made.exists()
    assert [one.where for one in found.untranslated] == ["evil"]
    write(tmp_path / "reading", {"evil": Getattr()})
    with pytest.raises(BeatUnreadable, match="expected beat's entries"):
        read_beat_file(tmp_path / "reading")


def test_what_is_not_beat_s_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BeatUnreadable, match="expected beat's file"):
        read_beat_file(tmp_path / "missing")
    (tmp_path / "text").write_text("x")
    with pytest.raises(BeatUnreadable, match="expected beat's file"):
        read_beat_file(tmp_path / "text")
    write(tmp_path / "list", [1])
    with pytest.raises(BeatUnreadable, match="expected beat's entries, found none"):
        read_beat_file(tmp_path / "list")
    with dumb.open(str(tmp_path / "cut"), "n") as shelf:
        shelf["entries"] = pickle.dumps({})[:-1]
    with pytest.raises(BeatUnreadable, match="found a pickle that is none"):
        read_beat_file(tmp_path / "cut")
