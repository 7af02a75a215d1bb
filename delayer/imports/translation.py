"""Other systems' schedules as ours: the result, and names. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID

from delayer.schedule.schedule import Schedule, problems

_UNFIT = re.compile("[^A-Za-z0-9._-]+")


class Untranslated(NamedTuple):
    """A part of the source that has no equal here. ``where``: such as ``line 7`` or an entry's name. ``why``: what it
    is, and what to do."""

    where: str
    why: str


@dataclass(slots=True)
class Translation:
    """The schedules of a source, and what is missing from them. ``now_ms``: problems are judged at this time.
    ``new_id``: returns an id that no schedule has."""

    now_ms: int
    new_id: Callable[[], UUID]
    prefix: str = field(default="", kw_only=True)
    """Before each name."""
    schedules: list[Schedule] = field(default_factory=list)
    untranslated: list[Untranslated] = field(default_factory=list)

    def add(self, where: str, schedule: Schedule) -> None:
        """Add a schedule, unless something is wrong with it."""
        if wrong := problems(schedule, self.now_ms):
            self.refuse(where, "; ".join(wrong))
        else:
            self.schedules.append(schedule)

    def refuse(self, where: str, why: str) -> None:
        self.untranslated.append(Untranslated(where, why))

    def name_like(self, text: str) -> str:
        """Turn the text into a name that no schedule of this translation has.

        >>> Translation(0, UUID).name_like("every 10 s: add!"), Translation(0, UUID).name_like("…")
        ('every-10-s-add', 'schedule')
        """
        plain = (self.prefix + (_UNFIT.sub("-", text).strip("._-") or "schedule"))[:90]
        taken = {schedule.name for schedule in self.schedules}
        return next(
            name for n in range(1, len(taken) + 2) if (name := plain if n == 1 else f"{plain}-{n}") not in taken
        )
