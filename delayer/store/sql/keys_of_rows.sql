-- The keys of the waiting messages at these places, with parameters as in delete_rows.sql.
SELECT m.key
FROM message AS m
JOIN unnest($1::smallint[], $2::timestamptz[], $3::bigint[]) AS w (lane, due, id)
  ON m.lane = w.lane AND m.due_at >= w.due AND m.due_at < w.due + interval '1 millisecond' AND m.id = w.id
WHERE m.due_at >= $4 AND m.due_at < $5 AND m.key IS NOT NULL
