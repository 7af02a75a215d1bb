"""What the supervisor knows of its workers, from what they say in the words of sd_notify(3). Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum


class Reading(Enum):
    """Where a worker is with reading its configuration again."""

    IDLE = "nothing is asked of it"
    OWED = "it is still starting, and SIGHUP would kill it: to be asked once it speaks"
    ASKED = "SIGHUP was sent"
    BUSY = "it said that it reads"


def parse(datagram: bytes) -> Mapping[str, str]:
    """The ``KEY=value`` lines of a datagram; others are left out."""
    lines = datagram.decode("utf-8", "replace").split("\n")
    return {key: value for key, equals, value in (line.partition("=") for line in lines) if equals}


@dataclass(slots=True)
class State:
    """One worker's place. The process in it changes; ``pid`` is None while there is none."""

    number: int
    pid: int | None = None
    heard: bool = False
    ready: bool = False
    killed: bool = False
    reading: Reading = Reading.IDLE
    status: str = ""

    def began(self, pid: int) -> None:
        """A new process, which has said nothing yet."""
        self.ended()
        self.pid = pid

    def ended(self) -> None:
        """The process is gone, and owes nothing any more: the next one reads the configuration when it starts."""
        self.pid = None
        self.heard = self.ready = self.killed = False
        self.reading = Reading.IDLE
        self.status = ""

    def ask_to_read(self) -> bool:
        """The configuration is to be read again. True if SIGHUP is to be sent now."""
        if self.pid is not None:
            self.reading = Reading.ASKED if self.heard else Reading.OWED
        return self.reading is Reading.ASKED

    def hear(self, fields: Mapping[str, str]) -> bool:
        """Take in what the process says. True if SIGHUP is to be sent now: it speaks, so it can take one."""
        self.heard = True
        self.status = fields.get("STATUS", self.status)
        if fields.get("RELOADING") == "1" and self.reading is Reading.ASKED:
            self.reading = Reading.BUSY
        if fields.get("READY") == "1":
            if self.reading is Reading.BUSY:
                self.reading = Reading.IDLE
            else:
                self.ready = True
        if fields.get("STOPPING") == "1":
            self.ready = False
        return self.reading is Reading.OWED and self.ask_to_read()


def summary(states: Sequence[State]) -> str:
    """One line about all of them."""
    said: dict[str, list[str]] = defaultdict(list)
    for state in states:
        if state.ready:
            said[state.status].append(str(state.number))
    # Who says something else than the others is named: after a reload that one of them refused, say.
    each = [what if len(said) == 1 else f"{what} ({', '.join(who)})" for what, who in said.items() if what]
    missing = [str(state.number) for state in states if not state.ready]
    count = f"{len(states) - len(missing)} of {len(states)}" if missing else str(len(states))
    waiting = [f"waiting for {', '.join(missing)}"] if missing else []
    return ": ".join([f"{count} workers ready", *filter(None, ["; ".join(each + waiting)])])
