-- Take the held rows of one lane whose retry is due. They stay in the table, locked, until they are settled. Rows
-- locked by another transaction (a cancel, an operator's retry) are left for the next claim. Waiting for them could
-- deadlock with a transaction that locks many held rows in another order.
--
-- $1 lane, $2 rows, $3 bytes (see claim.sql), $4 ids that the lane skips.
SELECT h.id, h.due_at, h.checksum, h.format, h.route, h.exchange, h.routing_key,
       h.to_exchange, h.to_key, h.properties, h.body, h.key, h.attempts,
       h.kind, h.reason, h.may_be_delivered, h.isolated, h.token
FROM held AS h
WHERE h.id IN (
    SELECT id
    FROM (
        SELECT id, sum(size) OVER (ORDER BY retry_at, id ROWS UNBOUNDED PRECEDING) AS upto, size
        FROM (
            SELECT id, retry_at, octet_length(body) + octet_length(properties) AS size
            FROM held
            WHERE lane = $1 AND retry_at <= statement_timestamp() AND id <> ALL($4)
            ORDER BY retry_at, id
            LIMIT $2
        ) AS soonest
    ) AS summed
    WHERE upto - size < $3 AND upto <= $3 + 1048576
)
ORDER BY h.id
FOR UPDATE SKIP LOCKED
