-- Of which routes one lane has rows, and between which instants, among the first $6 that are due from a place to an end.
-- Each row with the number of rows that were read, and the last place that was; no row, where there are none.
--
-- $1 lane, $2 bound of due_at (prunes partitions while planning), $3 id and $5 microseconds of the place behind which to
-- begin, $4 the end.
WITH seen AS MATERIALIZED (
    SELECT due_at, id, route
    FROM message
    WHERE lane = $1 AND due_at >= $2 AND due_at <= $4
      AND (due_at, id) > ('epoch'::timestamptz + $5::bigint * interval '1 microsecond', $3::bigint)
    ORDER BY due_at, id
    LIMIT $6
)
SELECT route, min(due_at), max(due_at), (SELECT count(*) FROM seen),
       (SELECT (extract(epoch FROM max(due_at)) * 1000000)::bigint FROM seen),
       (SELECT max(id) FROM seen WHERE due_at = (SELECT max(due_at) FROM seen))
FROM seen
GROUP BY route
