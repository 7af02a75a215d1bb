"""Which version of the IANA zone data this host has. Pure but for reading files.

Python looks for a zone in the host's directories first, then in the package ``tzdata``. A daemon keeps zones that it
has loaded, so it must call ``forget_zones`` (wall.py) when the version has changed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple
from zoneinfo import TZPATH

UNKNOWN: Final = "unknown"
_ALWAYS: Final = "UTC"
"""A zone that every copy of the data has."""


class ZoneData(NamedTuple):
    """A copy of the zone data. ``version``: such as ``2026b``, or ``UNKNOWN``."""

    version: str
    path: Path


def zone_directories() -> list[Path]:
    """The directories in which Python looks for zones, in its order."""
    package = importlib.util.find_spec("tzdata")
    places = package.submodule_search_locations if package else None
    return [*map(Path, TZPATH), *(Path(place) / "zoneinfo" for place in places or ())]


def zone_data(directories: Iterable[Path]) -> ZoneData | None:
    """The copy in use: the first that has zones. None if no directory does."""
    found = next((directory for directory in directories if (directory / _ALWAYS).is_file()), None)
    return None if found is None else ZoneData(_version(found), found)


def installed_version() -> str:
    """The version of the data that this host has now."""
    found = zone_data(zone_directories())
    return UNKNOWN if found is None else found.version


def _version(directory: Path) -> str:
    with suppress(OSError, UnicodeDecodeError), (directory / "tzdata.zi").open(encoding="ascii") as file:
        words = file.readline().split()
        if words[:2] == ["#", "version"] and len(words) == 3:
            return words[2]
    with suppress(OSError, UnicodeDecodeError):
        return (directory / "+VERSION").read_text("ascii").strip() or UNKNOWN
    return UNKNOWN
