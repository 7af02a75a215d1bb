-- Where the waiting messages $1 are: lane, a millisecond that the due instant lies in, id; in the order that a release
-- locks them in. Only the indexes are read, but all of them; and once, where "id = ANY" as a condition of the index would
-- read them once for every id.
SELECT lane, due_at, due_at + interval '1 millisecond', id
FROM message
WHERE id + 0 = ANY($1::bigint[])
ORDER BY lane, due_at, id
