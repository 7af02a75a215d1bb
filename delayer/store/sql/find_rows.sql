-- The places of the waiting messages $1: lane, due instant, id; in the order in which a release locks them. Reads each
-- partition's index of ids once per id.
SELECT lane, due_at, id
FROM message
WHERE id = ANY($1::bigint[])
ORDER BY lane, due_at, id
