-- The places of the waiting messages $1: lane, due instant, id; in the order in which a release locks them. This reads every
-- index once. "id = ANY" as a condition of the index would read each index once for every id.
SELECT lane, due_at, id
FROM message
WHERE id + 0 = ANY($1::bigint[])
ORDER BY lane, due_at, id
