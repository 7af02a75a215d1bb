-- Lock the first rows of a window and give them back as one row, each column as one byte string (store/segments/codec.py).
--
-- $1 lane; from ($9, $3) inclusive to ($4, $5) exclusive in the order of (due_at, id), where $9 is epoch microseconds
-- (exact up to the year 2255), as a portion may end inside a millisecond; the bounds of due_at once more, as $2 and $6,
-- because row comparisons prune no partition; $7 rows; $8 bytes of bodies and properties, but one row at least. Rows with
-- a key stay rows: a later message must find them; and those of more than $10 bytes, which gain nothing in a segment. Rows that somebody has locked (a cancel, another compaction) are left
-- to him. Rows that are locked here and do not fit $8 are left, too; they are summed up in the order that they were
-- locked in, and by whatever order would do as well. It is one pass over them: kept for a second one, in a CTE, they took a
-- third more of the server's time.
SELECT count(*) AS locked,
       string_agg(int8send(id), '') FILTER (WHERE before < $8) AS id,
       string_agg(timestamptz_send(due_at), '') FILTER (WHERE before < $8) AS due_at,
       string_agg(timestamptz_send(parked_at), '') FILTER (WHERE before < $8) AS parked_at,
       string_agg(int8send(checksum), '') FILTER (WHERE before < $8) AS checksum,
       string_agg(int8send(format), '') FILTER (WHERE before < $8) AS format,
       string_agg(int4send(octet_length(route)), '') FILTER (WHERE before < $8) AS route_lengths,
       string_agg(route, '') FILTER (WHERE before < $8) AS route,
       string_agg(int4send(octet_length(exchange)), '') FILTER (WHERE before < $8) AS exchange_lengths,
       string_agg(exchange, '') FILTER (WHERE before < $8) AS exchange,
       string_agg(int4send(octet_length(routing_key)), '') FILTER (WHERE before < $8) AS routing_key_lengths,
       string_agg(routing_key, '') FILTER (WHERE before < $8) AS routing_key,
       string_agg(int4send(octet_length(to_exchange)), '') FILTER (WHERE before < $8) AS to_exchange_lengths,
       string_agg(to_exchange, '') FILTER (WHERE before < $8) AS to_exchange,
       string_agg(int4send(octet_length(to_key)), '') FILTER (WHERE before < $8) AS to_key_lengths,
       string_agg(to_key, '') FILTER (WHERE before < $8) AS to_key,
       string_agg(int4send(octet_length(properties)), '') FILTER (WHERE before < $8) AS properties_lengths,
       string_agg(properties, '') FILTER (WHERE before < $8) AS properties,
       string_agg(int4send(octet_length(body)), '') FILTER (WHERE before < $8) AS body_lengths,
       string_agg(body, '') FILTER (WHERE before < $8) AS body
FROM (
    SELECT *, sum(octet_length(body) + octet_length(properties)) OVER (ROWS UNBOUNDED PRECEDING)
              - octet_length(body) - octet_length(properties) AS before
    FROM (
        SELECT id, due_at, parked_at, checksum, format, route, exchange, routing_key, to_exchange, to_key, properties, body
        FROM message
        WHERE lane = $1 AND due_at >= $2 AND due_at < $6 AND key IS NULL AND (due_at, id) < ($4, $5)
          AND octet_length(body) + octet_length(properties) <= $10
          AND (due_at, id) >= ('epoch'::timestamptz + $9::bigint * interval '1 microsecond', $3)
        ORDER BY due_at, id
        LIMIT $7
        FOR UPDATE SKIP LOCKED
    ) AS locked
) AS summed
