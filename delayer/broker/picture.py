"""What stands in the broker: the levels of a cascade and the queues around it, with their depths."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from delayer.core.cascade import Cascade


@dataclass(frozen=True, slots=True)
class LevelState:
    """``depth``: messages ready in the level's queue, None where the queue is missing."""

    level: int
    name: str
    ttl_ms: int
    depth: int | None


@dataclass(frozen=True, slots=True)
class Picture:
    """What ``topology show`` prints. ``queues``: depths of the queues around the cascade, None where one is missing.
    ``hidden``: which of all these the broker does not show to this user, whose depths are None too."""

    kind: str
    delivery: str
    levels: tuple[LevelState, ...]
    queues: dict[str, int | None]
    hidden: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self)


def names(cascade: Cascade, queues: Iterable[str] = ()) -> list[str]:
    """The queues whose depths :func:`drawn` needs."""
    return [*(level.name for level in cascade.levels()), *_around(cascade, queues)]


def drawn(
    cascade: Cascade, queues: Iterable[str], depths: Mapping[str, int | None], hidden: Iterable[str] = ()
) -> Picture:
    """The levels, ``queues``, and the strays queue."""
    return Picture(
        cascade.kind,
        cascade.delivery,
        tuple(LevelState(level.number, level.name, level.ttl_ms, depths[level.name]) for level in cascade.levels()),
        {name: depths[name] for name in _around(cascade, queues)},
        tuple(hidden),
    )


def _around(cascade: Cascade, queues: Iterable[str]) -> list[str]:
    return [*queues, *([cascade.strays] if cascade.strays else [])]
