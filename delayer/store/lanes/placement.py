"""The lanes for the rows of a transaction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

FAR_MS: Final = 120_000
"""Messages due later than this are spread over the lanes of all processes. A lane claims at least once a minute and
looks a minute ahead (lane.py), so its owner finds them in time. Sooner messages stay in a lane of this process."""


class Placement(NamedTuple):
    number: int
    """The lane of messages due soon whose route has no lane."""
    routes: Mapping[bytes, int]
    epoch: int | None = None
    """The epoch of lane ``number``, which this process owns; None if it owns no lane."""
    far: int = 0
    """The lane of messages due at ``far_ms`` or later."""
    far_ms: int = 1 << 62
    history: bool = False
