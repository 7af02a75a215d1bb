-- Find the waiting messages $1, each due in the millisecond that begins at its instant in $2. Returns the same as
-- find_rows.sql, but uses the primary key. $3 and $4 bound all of $2, to prune partitions while planning; $5 every
-- lane.
SELECT m.lane, m.due_at, m.id
FROM unnest($1::bigint[], $2::timestamptz[]) AS w (id, due)
CROSS JOIN LATERAL (
    SELECT lane, due_at, id FROM message
    WHERE lane = ANY($5::smallint[]) AND due_at >= w.due AND due_at < w.due + interval '1 millisecond' AND id = w.id
      AND due_at >= $3 AND due_at < $4
) AS m
ORDER BY lane, due_at, id
