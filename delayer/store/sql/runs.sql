-- Where the runs of one partition begin: of each lane and day (UTC), cut into runs of $2 rows at most, all about equally
-- long. Rows due after $1 count, those with a key too: reading the heap for the few that have one would cost far more
-- than a run that is a little short. The order is that of the primary key, so nothing is sorted.
SELECT lane, due_at, id, day_end, run_end - n AS rows
FROM (
    SELECT lane, due_at, id, n, total, runs,
           (n * runs / total + 1) * total / runs + CASE WHEN (n * runs / total + 1) * total % runs > 0 THEN 1 ELSE 0 END
               AS run_end,
           day + interval '1 day' AS day_end
    FROM (
        SELECT lane, due_at, id, day, total, (total + $2 - 1) / $2 AS runs,
               row_number() OVER (PARTITION BY lane, day ORDER BY due_at, id) - 1 AS n
        FROM (
            SELECT lane, due_at, id, date_trunc('day', due_at) AS day,
                   count(*) OVER (PARTITION BY lane, date_trunc('day', due_at)) AS total
            FROM {partition}
            WHERE due_at > $1
        ) AS counted
    ) AS numbered
) AS cut
WHERE n = 0 OR n * runs / total <> (n - 1) * runs / total
ORDER BY lane, due_at, id
