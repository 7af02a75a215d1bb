-- As claim_held.sql, of some routes only, among the first $6 rows behind a place whose time has come: a long run of rows of
-- other routes costs no statement more than that, and is read once, as the next claim begins behind it.
--
-- $1 lane, $2 rows, $3 bytes, $4 routes, $5 whether these are meant or all others, $6 rows that are read, $7 microseconds
-- and $8 id of the place.
-- One row at least: with the place of each that is meant, even if somebody else has it, and, where fewer than $2 are, the
-- last place that was read, if $6 rows were.
WITH soonest AS MATERIALIZED (
    SELECT id, retry_at, sum(size) OVER (ORDER BY retry_at, id ROWS UNBOUNDED PRECEDING) - size AS before
    FROM (
        SELECT id, retry_at, octet_length(body) + octet_length(properties) AS size
        FROM (
            SELECT id, retry_at, route, body, properties FROM held
            WHERE lane = $1 AND retry_at <= statement_timestamp()
              AND (retry_at, id) > ('epoch'::timestamptz + $7::bigint * interval '1 microsecond', $8::bigint)
            ORDER BY retry_at, id
            LIMIT $6
        ) AS first
        WHERE (route = ANY($4::bytea[])) = $5::bool
        ORDER BY retry_at, id
        LIMIT $2
    ) AS meant
), taken AS MATERIALIZED (
    SELECT h.id, h.due_at, h.checksum, h.format, h.route, h.exchange, h.routing_key,
           h.to_exchange, h.to_key, h.properties, h.body, h.key, h.attempts,
           h.kind, h.reason, h.may_be_delivered, h.isolated, h.token
    FROM held AS h
    WHERE h.id IN (SELECT id FROM soonest WHERE before < $3)
    ORDER BY h.id
    FOR UPDATE SKIP LOCKED
)
SELECT taken.id, taken.due_at, taken.checksum, taken.format, taken.route, taken.exchange, taken.routing_key,
       taken.to_exchange, taken.to_key, taken.properties, taken.body, taken.key, taken.attempts, taken.kind, taken.reason,
       taken.may_be_delivered, taken.isolated, taken.token,
       (extract(epoch FROM soonest.retry_at) * 1000000)::bigint AS meant_us, soonest.id AS meant_id,
       CASE WHEN (SELECT count(*) FROM soonest) < $2 THEN ARRAY(
           SELECT unnest(ARRAY[(extract(epoch FROM retry_at) * 1000000)::bigint, id]) FROM (
               SELECT retry_at, id FROM held
               WHERE lane = $1 AND retry_at <= statement_timestamp()
                 AND (retry_at, id) > ('epoch'::timestamptz + $7::bigint * interval '1 microsecond', $8::bigint)
               ORDER BY retry_at, id
               LIMIT 1 OFFSET $6 - 1
           ) AS last
       ) END AS read_to
FROM (SELECT) AS one
LEFT JOIN soonest ON true
LEFT JOIN taken ON taken.id = soonest.id
ORDER BY soonest.retry_at, soonest.id
