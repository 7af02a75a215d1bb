-- Read the first rows of the SQL inbox in open ranges of ids, in the order of their ids.
--
-- $1 and $2 the ids before and after each range, $3 rows, $4 bytes by weight (migrations/versions/0002), but at least one
-- row. No column of a row that is left out is read from its TOAST table.
SELECT id, exchange, routing_key, headers, properties, body, weight
FROM (
    SELECT *, sum(weight) OVER (ORDER BY id ROWS UNBOUNDED PRECEDING) - weight AS before
    FROM (
        SELECT i.*
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
