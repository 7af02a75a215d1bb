-- Read the first rows of the SQL inbox in open ranges of ids, in the order of their ids.
--
-- $1 and $2 the ids before and after each range, $3 rows, $4 bytes, but at least one row. A byte of headers weighs as much
-- as 16 of bodies: 64 kB of them may take 23 ms to decode, and the daemon does nothing else meanwhile.
SELECT id, exchange, routing_key, headers, properties, body, weight
FROM (
    SELECT *, sum(weight) OVER (ORDER BY id ROWS UNBOUNDED PRECEDING) - weight AS before
    FROM (
        SELECT i.*, octet_length(i.body) + 16 * octet_length(i.headers::text) AS weight
        FROM unnest($1::bigint[], $2::bigint[]) AS open (low, high)
        CROSS JOIN LATERAL (
            SELECT * FROM delayer_inbox WHERE id > open.low AND id < open.high ORDER BY id LIMIT $3
        ) AS i
        ORDER BY i.id
        LIMIT $3
    ) AS first
) AS summed
WHERE before < $4
ORDER BY id
