"""The version of the zone data in use."""

from __future__ import annotations

from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from delayer.schedule.zone_data import UNKNOWN, ZoneData, zone_data, zone_directories


def a_copy(directory: Path, **files: str) -> Path:
    directory.mkdir()
    for name, text in {"UTC": "TZif2", **files}.items():
        (directory / name).write_text(text, "utf-8")
    return directory


@pytest.mark.parametrize(
    ("files", "version"),
    [
        ({"tzdata.zi": "# version 2026f\n# This zic input file is in the public domain.\n"}, "2026f"),
        ({"+VERSION": "2025b\n"}, "2025b"),
        ({"tzdata.zi": "# version 2026f\n", "+VERSION": "2025b\n"}, "2026f"),
        ({"tzdata.zi": "R A 1916 o\n", "+VERSION": "2025b\n"}, "2025b"),
        ({"tzdata.zi": "", "+VERSION": ""}, UNKNOWN),
        ({"tzdata.zi": "# version ä\n"}, UNKNOWN),
        ({}, UNKNOWN),
    ],
)
def test_the_version_of_a_copy(tmp_path: Path, files: dict[str, str], version: str) -> None:
    copy = a_copy(tmp_path / "zoneinfo", **files)
    assert zone_data([copy]) == ZoneData(version, copy)


def test_the_first_copy_with_zones_is_in_use(tmp_path: Path) -> None:
    host, package = a_copy(tmp_path / "host", **{"+VERSION": "2025b"}), a_copy(tmp_path / "package")
    (tmp_path / "empty").mkdir()
    assert zone_data([tmp_path / "missing", tmp_path / "empty", host, package]) == ZoneData("2025b", host)
    assert zone_data([tmp_path / "missing"]) is None
    assert zone_data([]) is None


def test_this_host_has_zones() -> None:
    found = zone_data(zone_directories())
    assert found is not None and (found.path / "Europe" / "Berlin").is_file() and ZoneInfo("Europe/Berlin")


def test_the_package_has_a_version() -> None:
    found = zone_data(zone_directories()[-1:])
    assert found is not None and found.path.parent.name == "tzdata" and found.version.startswith("20")
