"""What stays true of a held message, whatever it is held for later: it stands in the reason. Pure."""

from __future__ import annotations

from typing import NamedTuple


class Remembered(NamedTuple):
    """``said``: how the first reason begins. ``before``: what a later reason has at its end."""

    said: str
    before: str

    def is_in(self, why: str) -> bool:
        return why.startswith(self.said) or self.before in why

    def again(self, why: str, before: str) -> str:
        """The reason of a message that was held for ``before``, and is held once more.

        >>> slow = Remembered("no confirm", "; before that: no confirm")
        >>> slow.again("nacked", "no confirm within 8 s")
        'nacked; before that: no confirm'
        >>> slow.again("returned: 404", "nacked; before that: no confirm")
        'returned: 404; before that: no confirm'
        >>> slow.again("nacked", "returned: 404")
        'nacked'
        """
        return why + self.before if self.is_in(before) and not self.is_in(why) else why
