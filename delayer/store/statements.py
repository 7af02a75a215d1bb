"""The statements of the hot paths, one per file under sql/, ready for EXPLAIN. A statement without a constant is for
commands only. And who owns the lanes, in SQL."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Final

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
READ_INBOX = read("read_inbox")
WRITE_WATERMARK = read("write_watermark")

_LANE_LOCKS: Final = (
    "SELECT k.objid::bigint AS number, k.pid FROM pg_locks AS k"
    " WHERE k.locktype = 'advisory' AND k.granted AND k.objsubid = 2 AND k.classid = 'lane'::regclass"
    " AND k.database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)
IS_OWNED: Final = f"EXISTS (SELECT FROM ({_LANE_LOCKS}) AS locks WHERE locks.number = l.number)"
"""Whether a live process owns the lane ``l``."""
LOOK: Final = f"""
WITH locks AS MATERIALIZED ({_LANE_LOCKS})
SELECT l.number, l.route,
       EXISTS (SELECT FROM locks WHERE locks.number = l.number) AS owned,
       ARRAY(SELECT pid FROM locks WHERE locks.number = 0) AS present, (SELECT intake FROM store) AS intake
FROM (SELECT) AS one
LEFT JOIN lane AS l ON true
ORDER BY l.number
"""
"""Every lane with its owner's lock, and the backends of all live processes (they share the lock of table lane, 0). At
least one row, with a null number if there is no lane."""
