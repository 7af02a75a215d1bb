-- As claim_held.sql, of some routes only, among the first $6 rows whose time has come.
--
-- $1 lane, $2 rows, $3 bytes, $4 routes, $5 whether these are meant or all others.
SELECT h.id, h.due_at, h.checksum, h.format, h.route, h.exchange, h.routing_key,
       h.to_exchange, h.to_key, h.properties, h.body, h.key, h.attempts, h.reason, h.token
FROM held AS h
WHERE h.id IN (
    SELECT id
    FROM (
        SELECT id, sum(size) OVER (ORDER BY retry_at, id ROWS UNBOUNDED PRECEDING) - size AS before
        FROM (
            SELECT id, retry_at, octet_length(body) + octet_length(properties) AS size
            FROM (
                SELECT id, retry_at, route, body, properties FROM held
                WHERE lane = $1 AND retry_at <= statement_timestamp()
                ORDER BY retry_at, id
                LIMIT $6
            ) AS first
            WHERE (route = ANY($4::bytea[])) = $5::bool
            ORDER BY retry_at, id
            LIMIT $2
        ) AS soonest
    ) AS summed
    WHERE before < $3
)
ORDER BY h.id
FOR UPDATE SKIP LOCKED
