-- Lock the first rows of a window. Returns codec.SCHEMA with instants in microseconds, the bytes before each row, and
-- how many rows are locked.
--
-- $1 lane; due from $2 to before $3, to prune partitions; starts at ($4 microseconds, $5) in the order of (due_at, id);
-- $6 rows; $7 bytes of bodies and properties, but at least one row. Rows of more than $8 bytes stay rows, because they
-- gain nothing in a segment. So do rows locked by another session (a cancel, another compaction), and rows locked here
-- that exceed $7. So do the waiting occurrences of schedules, whose keys are
-- from $9 to before $10.
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
          AND (key IS NULL OR key < $9 OR key >= $10)
        ORDER BY due_at, id
        LIMIT $6
        FOR UPDATE SKIP LOCKED
    ) AS rows
) AS summed
WHERE before < $7
