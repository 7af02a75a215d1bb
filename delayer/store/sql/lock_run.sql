-- Lock the first rows of a window and give them back: codec.SCHEMA with instants in microseconds, then their bytes before
-- each, and how many are locked.
--
-- $1 lane; due from $2 to before $3, which prune partitions; from ($4 microseconds, $5) on in the order of (due_at, id);
-- $6 rows; $7 bytes of bodies and properties, but one row at least. Rows of more than $8 bytes stay rows, because they
-- gain nothing in a segment. Rows that another session has locked (a cancel, another compaction) are left to it. Rows
-- that are locked here and do not fit $7 are left, too.
SELECT *
FROM (
    SELECT *, sum(octet_length(body) + octet_length(properties)) OVER (ROWS UNBOUNDED PRECEDING)
              - octet_length(body) - octet_length(properties) AS before, count(*) OVER () AS locked
    FROM (
        SELECT id, (extract(epoch FROM due_at) * 1000000)::bigint AS due_us,
               (extract(epoch FROM parked_at) * 1000000)::bigint AS parked_us, checksum, format, route, exchange,
               routing_key, to_exchange, to_key, properties, body, key
        FROM message
        WHERE lane = $1 AND due_at >= $2 AND due_at < $3
          AND (due_at, id) >= ('epoch'::timestamptz + $4::bigint * interval '1 microsecond', $5::bigint)
          AND octet_length(body) + octet_length(properties) <= $8
        ORDER BY due_at, id
        LIMIT $6
        FOR UPDATE SKIP LOCKED
    ) AS rows
) AS summed
WHERE before < $7
