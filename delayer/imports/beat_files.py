"""Reads the schedules of Celery beat: the file that beat keeps, and a settings module. Celery need not be installed.

beat's file is a shelf of pickles. Only the types named here are created. A stand-in that does nothing replaces every
other type, so a forged file cannot run code. A settings module is Python, and is run, with stand-ins for Celery if that
is not installed. No task is run or imported by this.
"""

from __future__ import annotations

import dbm
import io
import pickle
import runpy
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple, NoReturn
from zoneinfo import ZoneInfo

from delayer.schedule.wall import UnknownZone, zone_of

_ENTRIES: Final = ("beat_schedule", "CELERY_BEAT_SCHEDULE", "CELERYBEAT_SCHEDULE")
_ZONES: Final = ("timezone", "CELERY_TIMEZONE")
_UTC: Final = ("enable_utc", "CELERY_ENABLE_UTC")
_QUEUES: Final = ("task_default_queue", "CELERY_TASK_DEFAULT_QUEUE", "CELERY_DEFAULT_QUEUE")
_C_MODULES: Final[Mapping[str, str]] = {"dbm.gnu": "_gdbm", "dbm.ndbm": "_dbm", "dbm.sqlite3": "dbm.sqlite3"}
"""Kinds of beat's file that not every Python reads: what must be there for it."""
_CRONTAB: Final = ("minute", "hour", "day_of_week", "day_of_month", "month_of_year")


class BeatUnreadable(Exception):
    """The source cannot be read. The text names the expected and the found value, and the next step."""


class BeatSource(NamedTuple):
    """beat's entries, and the ``timezone``, ``task_default_queue`` and ``enable_utc`` of the application if the source
    has them. Without UTC and a zone, Celery uses the zone of the host."""

    entries: Mapping[str, Any]
    zone: str | None
    queue: str | None
    is_utc: bool


class _StandIn:
    """An object of a type that is not made. It keeps nothing."""

    def __init__(self, *_values: object, **_named: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


class ScheduleEntry(_StandIn):
    def __init__(  # noqa: PLR0917 - as Celery's
        self, name: Any = None, task: Any = None, last_run_at: Any = None, _count: Any = None, schedule: Any = None,
        args: Any = (), kwargs: Any = None, options: Any = None,
    ) -> None:  # fmt: skip
        self.name, self.task, self.last_run_at, self.schedule = name, task, last_run_at, schedule
        self.args, self.kwargs, self.options = args or (), kwargs or {}, options or {}


class crontab(_StandIn):  # noqa: N801 - the name is what beat.py looks at
    def __init__(  # noqa: PLR0917 - as Celery's
        self, minute: Any = "*", hour: Any = "*", day_of_week: Any = "*", day_of_month: Any = "*",
        month_of_year: Any = "*", nowfun: Any = None, app: Any = None,
    ) -> None:  # fmt: skip
        fields = (minute, hour, day_of_week, day_of_month, month_of_year)
        vars(self).update({f"_orig_{name}": value for name, value in zip(_CRONTAB, fields, strict=True)})
        self.nowfun = nowfun


class schedule(_StandIn):  # noqa: N801
    def __init__(self, run_every: Any = None, relative: Any = False, nowfun: Any = None, app: Any = None) -> None:
        self.run_every, self.relative, self.nowfun = run_every, relative, nowfun


class solar(_StandIn):  # noqa: N801
    def __init__(self, event: Any = None, *_place: Any, **_named: Any) -> None:
        self.event = event


_MADE: Final[Mapping[tuple[str, str], Any]] = {
    ("datetime", "datetime"): datetime,
    ("datetime", "timedelta"): timedelta,
    ("datetime", "timezone"): timezone,
    ("zoneinfo", "ZoneInfo"): ZoneInfo,
    ("celery.beat", "ScheduleEntry"): ScheduleEntry,
    ("celery.schedules", "crontab"): crontab,
    ("celery.schedules", "schedule"): schedule,
    ("celery.schedules", "solar"): solar,
}


def _load_zone(name: str, _from_cache: object = None) -> ZoneInfo:
    return zone_of(name)


def _attribute(of: object, name: str) -> Any:
    """The stand-in for ``getattr``, by which a ZoneInfo is pickled."""
    if (of, name) != (ZoneInfo, "_unpickle"):
        raise pickle.UnpicklingError(f"getattr of {name!r}")
    return _load_zone


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _attribute
        return _MADE.get((module, name)) or type(name, (_StandIn,), {})

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError(f"a persistent id {pid!r}")


def read_beat_file(path: Path) -> BeatSource:
    """Read the file that beat keeps, by default ``celerybeat-schedule``. Raises BeatUnreadable."""
    try:
        with dbm.open(str(path), "r") as shelf:
            raw = {name: shelf[name] for name in (b"entries", b"tz", b"utc_enabled") if name in shelf}
    except (*dbm.error, OSError, ImportError, ValueError, SyntaxError) as error:
        found, step = f"none that this Python reads: {error}", "pass"
        if (module := _module_of(path)) and find_spec(_C_MODULES[module]) is None:
            found = f"one of {module}, a module that this Python lacks"
            step = "run delayer by the Python that runs beat, or install the module (Debian: python3-gdbm), or pass"
        raise BeatUnreadable(
            f"{path}: expected beat's file (celerybeat-schedule, without .dat or .db), found {found}. "
            f"Next: {step} the settings module instead, a file that ends in .py."
        ) from None
    try:
        values = {name: _Unpickler(io.BytesIO(pickled)).load() for name, pickled in raw.items()}
    except UnknownZone as error:
        raise BeatUnreadable(f"{path}: {error}") from None
    except Exception as error:  # noqa: BLE001 - A pickle may raise anything.
        raise BeatUnreadable(f"{path}: expected beat's entries, found a pickle that is none: {error}") from None
    entries, zone = values.get(b"entries"), values.get(b"tz")
    if not isinstance(entries, dict):
        raise BeatUnreadable(f"{path}: expected beat's entries, found none. Next: check that beat wrote this file.")
    is_utc = bool(values.get(b"utc_enabled", True))
    return BeatSource(entries, zone if isinstance(zone, str) else None, None, is_utc)


def _module_of(path: Path) -> str:
    """The module that wrote this file: one of _C_MODULES, or "". Python recognizes some only if it has the module."""
    if path.with_name(f"{path.name}.db").is_file():
        return "dbm.ndbm"
    try:
        with path.open("rb") as file:
            is_sqlite = file.read(16) == b"SQLite format 3\0"
        return "dbm.sqlite3" if is_sqlite else dbm.whichdb(str(path)) or ""
    except OSError:
        return ""


def read_beat_settings(path: Path) -> BeatSource:
    """Run a settings module, and read ``beat_schedule`` from it. Raises BeatUnreadable."""
    try:
        with _celery():
            found = runpy.run_path(str(path))
    except Exception as error:  # noqa: BLE001 - It may raise anything.
        raise BeatUnreadable(
            f"{path}: expected a settings module that can be run, found {type(error).__name__}: {error}. Next: pass "
            "beat's file instead, or a module that imports nothing of the application."
        ) from None
    entries = next((found[name] for name in _ENTRIES if name in found), None)
    if not isinstance(entries, Mapping):
        raise BeatUnreadable(f"{path}: expected {' or '.join(_ENTRIES)}, a dictionary, found none")
    zone, queue, is_utc = (
        next((found[name] for name in names if name in found), None) for names in (_ZONES, _QUEUES, _UTC)
    )
    zone, queue = (None if one is None else str(one) for one in (zone, queue))
    return BeatSource(entries, zone, queue, is_utc is None or bool(is_utc))


@contextmanager
def _celery() -> Iterator[None]:
    """Let ``import celery`` find stand-ins, if Celery is not installed."""
    if find_spec("celery") is not None:
        yield
        return
    package, module = ModuleType("celery"), ModuleType("celery.schedules")
    package.__path__ = []
    vars(module).update(crontab=crontab, schedule=schedule, solar=solar)
    vars(package).update(schedules=module)
    sys.modules |= {"celery": package, "celery.schedules": module}
    try:
        yield
    finally:
        del sys.modules["celery"], sys.modules["celery.schedules"]
