-- The same as find_rows.sql, by the index of ids, which this reads once for every id.
SELECT lane, due_at, id
FROM message
WHERE id = ANY($1::bigint[])
ORDER BY lane, due_at, id
