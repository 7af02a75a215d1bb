-- Delete the waiting messages at the places ($1 lanes, $2 due instants to the millisecond, $3 ids), in the order in
-- which a release locks them. $4 and $5 bound all of $2, to prune partitions while planning.
DELETE FROM message AS m
USING unnest($1::smallint[], $2::timestamptz[], $3::bigint[]) AS w (lane, due, id)
WHERE m.lane = w.lane AND m.due_at >= w.due AND m.due_at < w.due + interval '1 millisecond' AND m.id = w.id
  AND m.due_at >= $4 AND m.due_at < $5
RETURNING m.id, m.lane, m.key, m.route, m.to_exchange, m.to_key, m.due_at, m.parked_at,
          octet_length(m.body) + octet_length(m.properties) AS size
