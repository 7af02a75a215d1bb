"""When Celery's workers would run a task: header ``eta``. Pure."""

from __future__ import annotations

from typing import Final

from delayer.core.delay import UnreadableDelay, read_instant_ms, shown

ETA: Final = b"eta"


def eta_ms(value: object) -> int | None:
    """The instant that an ``eta`` header says, in epoch ms, rounded up. Every task has the header; that of a task which
    is not delayed is void, and this is None.

    Without a zone it is UTC, as Celery's own setting ``enable_utc`` has it. Raises UnreadableDelay.

    >>> eta_ms("1970-01-01T00:00:01.000001"), eta_ms("1970-01-01T01:00:02+01:00"), eta_ms(None)
    (1001, 2000, None)
    """
    if value is None:
        return None
    if isinstance(value, str):
        for spelled in (value, value + "Z"):
            try:
                return read_instant_ms(spelled)
            except UnreadableDelay:
                continue
    raise UnreadableDelay(f"expected an instant in ISO 8601, found {shown(value)}")
