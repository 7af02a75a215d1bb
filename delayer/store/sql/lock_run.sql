-- Lock the first rows of a window and give them back as one row, each column as one byte string (store/copying.py).
--
-- $1 lane; from ($9, $3) inclusive to ($4, $5) exclusive in the order of (due_at, id), where $9 is epoch microseconds
-- (exact up to the year 2255), as a portion may end inside a millisecond; the bounds of due_at once more, as $2 and $6,
-- because row comparisons prune no partition; $7 rows; $8 bytes of bodies and properties, but one row at least. Rows with
-- a key stay rows: a later message must find them. Rows that somebody has locked (a cancel, another compaction) are left
-- to him. Rows that are locked here and do not fit $8 are left, too; they are summed up in the order that they were
-- locked in, and by whatever order would do as well.
WITH locked AS MATERIALIZED (
    SELECT id, due_at, parked_at, checksum, format, route, exchange, routing_key, to_exchange, to_key, properties, body
    FROM message
    WHERE lane = $1 AND due_at >= $2 AND due_at < $6 AND key IS NULL
      AND (due_at, id) >= ('epoch'::timestamptz + $9::bigint * interval '1 microsecond', $3) AND (due_at, id) < ($4, $5)
    ORDER BY due_at, id
    LIMIT $7
    FOR UPDATE SKIP LOCKED
), summed AS (
    SELECT *, sum(octet_length(body) + octet_length(properties)) OVER (ROWS UNBOUNDED PRECEDING)
              - octet_length(body) - octet_length(properties) AS before
    FROM locked
)
SELECT (SELECT count(*) FROM locked) AS locked,
       string_agg(int8send(id), '') AS id,
       string_agg(timestamptz_send(due_at), '') AS due_at,
       string_agg(timestamptz_send(parked_at), '') AS parked_at,
       string_agg(int8send(checksum), '') AS checksum,
       string_agg(int8send(format), '') AS format,
       string_agg(int4send(octet_length(route)), '') AS route_lengths, string_agg(route, '') AS route,
       string_agg(int4send(octet_length(exchange)), '') AS exchange_lengths, string_agg(exchange, '') AS exchange,
       string_agg(int4send(octet_length(routing_key)), '') AS routing_key_lengths,
       string_agg(routing_key, '') AS routing_key,
       string_agg(int4send(octet_length(to_exchange)), '') AS to_exchange_lengths,
       string_agg(to_exchange, '') AS to_exchange,
       string_agg(int4send(octet_length(to_key)), '') AS to_key_lengths, string_agg(to_key, '') AS to_key,
       string_agg(int4send(octet_length(properties)), '') AS properties_lengths, string_agg(properties, '') AS properties,
       string_agg(int4send(octet_length(body)), '') AS body_lengths, string_agg(body, '') AS body
FROM summed
WHERE before < $8
