"""The statements of the hot paths, one a file under sql/, as they stand for EXPLAIN."""

from __future__ import annotations

from importlib.resources import files

_HERE = files("delayer.store") / "sql"


def _read(name: str) -> str:
    return (_HERE / f"{name}.sql").read_text(encoding="utf-8")


CLAIM = _read("claim")
CLAIM_HELD = _read("claim_held")
NEXT_DUE = _read("next_due")
NEXT_RETRY = _read("next_retry")
COUNT = _read("count")
COUNT_PARKED = _read("count_parked")
HOLD_AGAIN = _read("hold_again")
NEXT_SEGMENT = _read("next_segment")
OVERVIEW = _read("overview")
LOOK = _read("look")
WRITE_WATERMARK = _read("write_watermark")
LOCK_RUN = _read("lock_run")
MEAN_SIZE = _read("mean_size")
INSERT_SEGMENT = _read("insert_segment")
DELETE_RUN = _read("delete_run")
COUNT_SEGMENTS = _read("count_segments")
LIST_SEGMENTS = _read("list_segments")
FIND_ROWS = _read("find_rows")
FIND_ROWS_AT = _read("find_rows_at")
MOVE_ROWS = _read("move_rows")
DELETE_ROWS = _read("delete_rows")
KEYS_OF_ROWS = _read("keys_of_rows")
TRAFFIC = _read("traffic")
