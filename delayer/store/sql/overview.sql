-- Every lane with its owner, whether the owner is alive, its counters and the next retry of its
-- held rows. Reads a few rows, and no messages.
SELECT l.number, l.owner, l.route,
       EXISTS (
           SELECT FROM pg_locks AS k
           WHERE k.locktype = 'advisory' AND k.granted AND k.objsubid = 2
             AND k.database = (SELECT oid FROM pg_database WHERE datname = current_database())
             AND k.classid = 'lane'::regclass AND k.objid = l.number::int::oid
       ) AS alive,
       array(SELECT c.kind FROM counter AS c WHERE c.lane = l.number ORDER BY c.kind) AS kinds,
       array(SELECT c.n FROM counter AS c WHERE c.lane = l.number ORDER BY c.kind) AS numbers,
       (SELECT max(c.at) FROM counter AS c WHERE c.lane = l.number AND c.kind IN ('released', 'held')) AS advanced_at,
       (SELECT min(h.retry_at) FROM held AS h WHERE h.lane = l.number) AS next_retry
FROM lane AS l
ORDER BY l.number
