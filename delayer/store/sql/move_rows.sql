-- Move the waiting messages at the places ($1 lanes, $2 due instants to the millisecond, $3 ids) to due instant $4, or
-- if that is null, by $5 milliseconds. $6 and $7 bound all of $2, to prune partitions while planning. An instant in the
-- past becomes now, so that late_limit does not hold the message. A message already due keeps its instant.
--
-- The rows are deleted and inserted again, with their id and instant of parking. An UPDATE into another partition makes
-- waiting transactions fail; after a DELETE they find no row.
WITH moved AS (
    DELETE FROM message AS m
    USING unnest($1::smallint[], $2::timestamptz[], $3::bigint[]) AS w (lane, due, id)
    WHERE m.lane = w.lane AND m.due_at >= w.due AND m.due_at < w.due + interval '1 millisecond' AND m.id = w.id
      AND m.due_at >= $6 AND m.due_at < $7
    RETURNING m.*
)
INSERT INTO message (id, due_at, parked_at, checksum, lane, format, route, exchange, routing_key, to_exchange, to_key,
                     properties, body, key)
SELECT id, greatest(coalesce($4::timestamptz, due_at + $5::bigint * interval '1 millisecond'),
                    least(due_at, date_trunc('milliseconds', now()))), parked_at, checksum, lane, format,
       route, exchange, routing_key, to_exchange, to_key, properties, body, key
FROM moved
RETURNING id, lane, due_at, key
