"""Which lanes the rows of a transaction go into."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

FAR_MS: Final = 120_000
"""Messages that are due later than this are spread over all lanes, including those of other processes. A lane claims at
least once a minute and looks a minute ahead (lane.py), so its owner finds them in time. Messages that are due sooner
stay in a lane of this process."""


class Placement(NamedTuple):
    """The lanes that the rows of one transaction go into."""

    number: int
    """The lane of messages that are due soon, and whose route has no lane."""
    routes: Mapping[bytes, int]
    """The lanes of limited routes."""
    epoch: int | None = None
    """The epoch of lane ``number``, which this process owns; None if it owns no lane."""
    far: int = 0
    """The lane of messages that are due at ``far_ms`` or later."""
    far_ms: int = 1 << 62
    history: bool = False
    """Whether the store keeps a history."""
