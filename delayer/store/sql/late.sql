-- When the latest of the messages was due that wait for their release from the lanes $1 now. Only of those that were due
-- from $2 to $3 (now; both epoch milliseconds): a second is late enough to know, and behind it are the dead entries of all that was released.
SELECT $3::float8 - (extract(epoch FROM min(first.due_at)) * 1000)::float8
FROM unnest($1::smallint[]) AS owned (number)
CROSS JOIN LATERAL (
    SELECT m.due_at FROM message AS m
    WHERE m.lane = owned.number AND m.due_at >= to_timestamp($2::float8 / 1000) AND m.due_at <= to_timestamp($3::float8 / 1000)
    ORDER BY m.due_at LIMIT 1
) AS first
