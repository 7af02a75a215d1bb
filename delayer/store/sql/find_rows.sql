-- Where the waiting messages $1 are: lane, due instant, id; in the order that a release
-- locks them in. Only the indexes are read, but all of them; and once, where "id = ANY" as a condition of the index would
-- read them once for every id.
SELECT lane, due_at, id
FROM message
WHERE id + 0 = ANY($1::bigint[])
ORDER BY lane, due_at, id
