"""Source `jsonl`: our own export (core/lines.py)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from delayer.core import lines
from delayer.core.hold import Hold, unfit
from delayer.core.importing import Item, Meant, Rewrite, Survey
from delayer.core.lines import End, Line, NotALine
from delayer.legacy.files import FileSource, Reading, Unreadable
from delayer.legacy.ports import ImportImpossible
from delayer.store.envelope import checksum
from delayer.wire.properties import MalformedProperties, Properties

NAME = "jsonl"
NOT_SOUND = unfit("the bytes do not fit the checksum that was exported with them")


def read(text: bytes) -> Item | End | None:
    """The message of one line. Raises Unreadable."""
    if not text.strip():
        return None
    try:
        line = lines.read(text)
        if isinstance(line, End):
            return line
        Properties.parse(line.parcel.properties)
    except (NotALine, MalformedProperties) as error:
        raise Unreadable(str(error)) from error
    return Item(line.parcel, _hold(line))


def _hold(line: Line) -> Hold | None:
    parcel = line.parcel
    if line.crc not in (None, checksum(parcel.exchange, parcel.routing_key, parcel.properties, parcel.body)):
        return NOT_SOUND.after(line.held)
    return line.held


class JsonLines(FileSource):
    """The file, and what its last line says of it."""

    def __init__(self, path: Path, meant: Meant, rewrites: Sequence[Rewrite] = ()) -> None:
        super().__init__(NAME, path, meant, rewrites)
        self._ends: list[int] = []

    def read(self, line: bytes) -> Reading:
        """See FileSource."""
        found = read(line)
        if isinstance(found, End):
            self._ends.append(found.messages)
            return None
        return found

    def look(self) -> Survey:
        """See FileSource. Raises ImportImpossible for a file that was cut."""
        self._ends.clear()
        survey = super().look()
        found = self.records - len(self._ends)
        if not self._ends:
            survey.doubt("the file does not say how many messages it has: whether it was cut is not known")
        elif sum(self._ends) != found:
            raise ImportImpossible(
                f"{self.path}: expected {sum(self._ends)} messages by its last line, found {found}: it was cut, or "
                "lines are missing"
            )
        return survey
