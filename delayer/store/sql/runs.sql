-- Where the runs of one partition begin: of each lane and day (UTC), cut into runs of $2 rows at most, all about equally
-- long. Rows due after $1 count, those with a key too: reading the heap for the few that have one would cost far more
-- than a run that is a little short. In a day's partition {day} is a constant and {of_day} empty: the order is that of
-- the primary key, and nothing is sorted. Instants travel as milliseconds: a run that begins inside one begins behind all
-- ids of that millisecond, so that it is one with the next, and no row is left out or in two.
SELECT lane, due_at, CASE WHEN due_at > date_trunc('milliseconds', due_at) THEN 9223372036854775807 ELSE id END AS first_id,
       day_end, run_end - n AS rows
FROM (
    SELECT lane, due_at, id, n, total, runs,
           (n * runs / total + 1) * total / runs + CASE WHEN (n * runs / total + 1) * total % runs > 0 THEN 1 ELSE 0 END
               AS run_end,
           day + interval '1 day' AS day_end
    FROM (
        SELECT *, (total + $2 - 1) / $2 AS runs
        FROM (
            SELECT lane, due_at, id, {day} AS day,
                   row_number() OVER (PARTITION BY lane{of_day} ORDER BY due_at, id) - 1 AS n,
                   count(*) OVER (PARTITION BY lane{of_day}) AS total
            FROM {partition}
            WHERE due_at > $1
        ) AS numbered
    ) AS counted
) AS cut
WHERE n = 0 OR n * runs / total <> (n - 1) * runs / total
ORDER BY lane, due_at, id
