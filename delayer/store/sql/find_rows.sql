-- The places of the waiting messages $1: lane, due instant, id; in the order in which a release locks them. This reads every
-- primary key once. For a few ids find_few_rows.sql is faster.
SELECT lane, due_at, id
FROM message
WHERE id + 0 = ANY($1::bigint[])
ORDER BY lane, due_at, id
