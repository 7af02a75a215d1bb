"""An export is on the disk before readers see it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from delayer.audit import dataset, delta


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The paths synced so far."""
    paths = list[Path]()
    sync = os.fsync

    def record(number: int) -> None:
        paths.append(Path(f"/proc/self/fd/{number}").readlink())
        sync(number)

    monkeypatch.setattr(os, "fsync", record)
    return paths


@pytest.fixture
def partition() -> Path:
    """A partition's file, relative to a dataset."""
    digest = dataset.Digest(1, 7)
    return Path(dataset.Partition(20_000, "mail.in").directory, dataset.name_of(digest, bodies=False, now_ms=1))


def looking(do: Callable[..., Any], synced: list[Path], seen: list[set[Path]]) -> Callable[..., Any]:
    """Wrap ``do`` so that it first adds the paths synced so far to ``seen``."""

    def look(*arguments: Any, **named: Any) -> Any:
        seen.append(set(synced))
        return do(*arguments, **named)

    return look


def write(file: Path) -> None:
    file.parent.mkdir(parents=True)
    file.touch()


def directories(root: Path, file: Path) -> set[Path]:
    """The directories on the path from ``root`` to the file."""
    return {root / part for part in file.parents}


def test_directories_are_synced_before_a_plain_dataset_is_visible(
    tmp_path: Path, partition: Path, synced: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second export links the first one's file into new directories."""
    where, seen = tmp_path / "backlog", list[set[Path]]()
    with dataset.plain(where) as target:
        write(target.root / partition)
        target.commit([], {}, [])
        assert directories(target.root, partition) <= set(synced)
    with dataset.plain(where) as target:
        monkeypatch.setattr(dataset, "exchange", looking(dataset.exchange, synced, seen))
        target.commit([partition], {}, [])
        assert directories(target.root, partition) <= seen[0]
    assert (where / partition).exists()
    assert where.parent in synced


def test_directories_are_synced_before_a_commit_to_a_delta_table(
    tmp_path: Path, partition: Path, synced: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Directories without a new file are left alone, because a concurrent VACUUM may remove them."""
    where, seen = tmp_path / "table", list[set[Path]]()
    create = looking(delta.create_table_with_add_actions, synced, seen)
    monkeypatch.setattr(delta, "create_table_with_add_actions", create)
    with delta.delta(where, bodies=False) as target:
        write(where / partition)
        (where / "due_day=2020-01-01/route=other").mkdir(parents=True)
        target.commit([], {dataset.Partition(20_000, "mail.in"): where / partition}, [])
    assert directories(where, partition) == seen[0]
