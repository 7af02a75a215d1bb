-- Every lane with its owner's lock, and the backends of all live processes (they share the lock of table lane, 0).
-- Returns at least one row, with a null number if there is no lane.
WITH locks AS MATERIALIZED (
    SELECT k.objid::bigint AS number, k.pid
    FROM pg_locks AS k
    WHERE k.locktype = 'advisory' AND k.granted AND k.objsubid = 2
      AND k.database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND k.classid = 'lane'::regclass
)
SELECT l.number, l.route,
       EXISTS (SELECT FROM locks WHERE locks.number = l.number) AS owned,
       ARRAY(SELECT pid FROM locks WHERE locks.number = 0) AS present, (SELECT intake FROM store) AS intake
FROM (SELECT) AS one
LEFT JOIN lane AS l ON true
ORDER BY l.number
