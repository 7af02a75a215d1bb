-- Take rows of one lane that are due and of some routes only, soonest first, bounded by count and bytes; of the first $6
-- rows behind a place, so that a long run of rows of other routes costs no statement more than that.
--
-- $1 lane, $2 bound of due_at (prunes partitions while planning), $3 id and $9 microseconds of the place behind which to
-- begin, $4 horizon, $5 rows, $6 rows that are read, $7 routes, $8 whether these are meant or all others, $10 bytes.
-- One row at least: with the number of rows that were read and meant, and the last place that was read.
WITH seen AS MATERIALIZED (
    SELECT tableoid AS part, ctid AS place, due_at, id, octet_length(body) + octet_length(properties) AS size,
           (route = ANY($7::bytea[])) = $8::bool AS meant
    FROM message
    WHERE lane = $1 AND due_at >= $2 AND due_at <= $4 AND due_at <= statement_timestamp()
      AND (due_at, id) > ('epoch'::timestamptz + $9::bigint * interval '1 microsecond', $3::bigint)
    ORDER BY due_at, id
    LIMIT $6
), batch AS (
    SELECT part, place
    FROM (
        SELECT part, place, row_number() OVER soonest AS n, sum(size) OVER soonest - size AS before
        FROM seen
        WHERE meant
        WINDOW soonest AS (ORDER BY due_at, id ROWS UNBOUNDED PRECEDING)
    ) AS counted
    WHERE n <= $5 AND before < $10
), gone AS (
    DELETE FROM message AS m
    USING batch
    WHERE m.ctid = batch.place AND m.tableoid = batch.part
      AND m.lane = $1 AND m.due_at >= $2 AND m.due_at <= $4 AND m.due_at <= statement_timestamp()
    RETURNING m.id, m.due_at, m.checksum, m.format, m.route, m.exchange, m.routing_key,
              m.to_exchange, m.to_key, m.properties, m.body, m.key
), last AS (
    SELECT count(*) AS seen, count(*) FILTER (WHERE meant) AS meant,
           (extract(epoch FROM max(due_at)) * 1000000)::bigint AS last_us
    FROM seen
)
SELECT gone.id, gone.due_at, gone.checksum, gone.format, gone.route, gone.exchange, gone.routing_key,
       gone.to_exchange, gone.to_key, gone.properties, gone.body, gone.key,
       last.seen, last.meant, last.last_us,
       (SELECT max(id) FROM seen WHERE due_at = (SELECT max(due_at) FROM seen)) AS last_id,
       (extract(epoch FROM gone.due_at) * 1000000)::bigint AS due_us
FROM last
LEFT JOIN gone ON true
