"""The statements of the hot paths, one per file under sql/, ready for EXPLAIN. A statement without a constant is for
commands only."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

_HERE = files("delayer.store") / "sql"


@cache
def read(name: str) -> str:
    return (_HERE / f"{name}.sql").read_text(encoding="utf-8")


CLAIM = read("claim")
CLAIM_HELD = read("claim_held")
NEXT_DUE = read("next_due")
NEXT_RETRY = read("next_retry")
COUNT = read("count")
COUNT_PARKED = read("count_parked")
HOLD_AGAIN = read("hold_again")
LOOK = read("look")
WRITE_WATERMARK = read("write_watermark")
