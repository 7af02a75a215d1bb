-- Read the first rows of the SQL inbox in open ranges of ids, in the order of their ids.
--
-- $1 and $2 the ids before and after each range, in ascending order, $3 rows, $4 bytes by weight
-- (migrations/versions/0002), but at least one row. No column of a row that is left out is read from its TOAST table.
-- The order by the number of the range, then by id, is that of ids, and lets a read end at $3 rows before the last range.
SELECT id, exchange, routing_key, headers, properties, body, weight
FROM (
    SELECT *, sum(weight) OVER (ORDER BY nth, id ROWS UNBOUNDED PRECEDING) - weight AS before
    FROM (
        SELECT i.*, open.nth
        FROM unnest($1::bigint[], $2::bigint[]) WITH ORDINALITY AS open (low, high, nth)
        CROSS JOIN LATERAL (
            SELECT * FROM delayer_inbox WHERE id > open.low AND id < open.high ORDER BY id LIMIT $3
        ) AS i
        ORDER BY open.nth, i.id
        LIMIT $3
    ) AS first
) AS summed
WHERE before < $4
ORDER BY nth, id
