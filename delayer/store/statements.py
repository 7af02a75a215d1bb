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

TRUSTED: Final = (
    "coalesce(a.usename = session_user OR has_table_privilege(a.usesysid, 'lane', 'UPDATE') OR EXISTS ("
    "SELECT FROM pg_roles AS r WHERE pg_has_role(a.usesysid, r.oid,"
    " CASE WHEN current_setting('server_version_num')::int < 160000 THEN 'MEMBER' ELSE 'SET' END)"
    " AND has_table_privilege(r.oid, 'lane', 'UPDATE')), false)"
)
"""Whether the session ``a`` of pg_stat_activity is a daemon's or a command's, and not another role's, by its rights, or
by those that SET ROLE gives it (from Postgres 16 on, not every member has it). Every role may take advisory locks, and
give its session any name."""
DAEMONS: Final = (
    "SELECT a.* FROM pg_stat_activity AS a"
    f" WHERE a.datname = current_database() AND a.application_name LIKE 'delayer presence%' AND {TRUSTED}"
)
"""The presences of live daemons."""
OURS: Final = (
    "k.locktype = 'advisory' AND k.objsubid = 2"
    " AND k.database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)
"""Whether the lock ``k`` of pg_locks is in this database, and has two numbers like those of the store."""
_LANE_LOCKS: Final = (
    f"SELECT k.objid::bigint AS number, k.pid, {TRUSTED} AS trusted"
    " FROM pg_locks AS k LEFT JOIN pg_stat_activity AS a USING (pid)"
    f" WHERE {OURS} AND k.granted AND k.classid = 'lane'::regclass"
)
IS_OWNED: Final = f"EXISTS (SELECT FROM ({_LANE_LOCKS}) AS locks WHERE locks.number = l.number AND locks.trusted)"
"""Whether a live process owns the lane ``l``."""
LOOK: Final = f"""
WITH locks AS MATERIALIZED ({_LANE_LOCKS})
SELECT l.number, l.route,
       EXISTS (SELECT FROM locks WHERE locks.number = l.number) AS owned,
       ARRAY(SELECT pid FROM locks WHERE locks.number = 0 AND locks.trusted) AS present,
       (SELECT intake FROM store) AS intake
FROM (SELECT) AS one
LEFT JOIN lane AS l ON true
ORDER BY l.number
"""
"""Every lane, and whether any session has its lock; and the backends of all live processes, which share the lock (lane,
0). At least one row, with a null number if there is no lane."""
