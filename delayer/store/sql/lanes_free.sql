-- Lanes without a living owner, the ones with rows first. The owner's lock is (table lane, number) in pg_locks.
SELECT l.number,
       coalesce(sum(CASE WHEN c.kind IN ('parked', 'restored') THEN c.n
                         WHEN c.kind IN ('released', 'cancelled', 'compacted') THEN -c.n END), 0) > 0 AS has_rows
FROM lane AS l
LEFT JOIN counter AS c ON c.lane = l.number
WHERE NOT EXISTS (
    SELECT FROM pg_locks AS k
    WHERE k.locktype = 'advisory' AND k.granted AND k.objsubid = 2
      AND k.database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND k.classid = 'lane'::regclass AND k.objid = l.number::int::oid
)
GROUP BY l.number
ORDER BY has_rows DESC, l.number
