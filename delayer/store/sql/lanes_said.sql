-- The lanes of which somebody holds the advisory lock (table lane, $1 + number): 0 owned, and see handover.py.
SELECT (k.objid::bigint - $1)::smallint AS number
FROM pg_locks AS k
WHERE k.locktype = 'advisory' AND k.granted AND k.objsubid = 2
  AND k.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND k.classid = 'lane'::regclass AND k.objid::bigint BETWEEN $1 + 1 AND $1 + 32767
