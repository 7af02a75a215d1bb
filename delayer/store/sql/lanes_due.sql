-- Lanes without a living owner in which something is due (or tried again) by $1, soonest first. One that somebody asks
-- for (handover.py) is as good as owned.
--
-- $1 horizon, $2 where to begin at the latest: a lane is read from a little before its watermark, as behind it are the
-- dead entries of all that was released; with -infinity, from its beginning. What is free is found first, or the busy
-- lanes of the living would be read as well; and each lane is asked for its first row, by the order of the index.
WITH free AS MATERIALIZED (
    SELECT l.number, least(l.watermark - interval '10 seconds', $2) AS start
    FROM lane AS l
    WHERE NOT EXISTS (
        SELECT FROM pg_locks AS k
        WHERE k.locktype = 'advisory' AND k.granted AND k.objsubid = 2
          AND k.database = (SELECT oid FROM pg_database WHERE datname = current_database())
          AND k.classid = 'lane'::regclass AND k.objid IN (l.number::int::oid, (200000 + l.number)::oid)
    )
)
SELECT number
FROM free
CROSS JOIN LATERAL (
    SELECT least(
        (SELECT m.due_at FROM message AS m
         WHERE m.lane = free.number AND m.due_at >= free.start AND m.due_at <= $1
         ORDER BY m.due_at LIMIT 1),
        (SELECT h.retry_at FROM held AS h
         WHERE h.lane = free.number AND h.retry_at <= $1
         ORDER BY h.retry_at LIMIT 1)
    ) AS due
    OFFSET 0
) AS soonest
WHERE due IS NOT NULL
ORDER BY due, number
