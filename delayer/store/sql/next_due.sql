-- When the next row of one lane is due, and the server's time. Reads one index entry.
--
-- $1 lane, $2 and $3 the place (due instant, id) after which to look, $4 horizon, $5 ids that open claims have.
SELECT (
    SELECT due_at FROM message
    WHERE lane = $1 AND due_at >= $2 AND (due_at, id) > ($2, $3) AND due_at <= $4 AND id <> ALL($5)
    ORDER BY due_at, id LIMIT 1
), (extract(epoch FROM clock_timestamp()) * 1000)::float8
