-- When the next row of one lane is due, the server's time, and the id of the row. Always one row. Reads one index entry.
--
-- $1 lane, $2 and $3 the place (due instant, id) after which to look, $4 horizon, $5 ids that open claims have.
SELECT due_at, (extract(epoch FROM clock_timestamp()) * 1000)::float8, id
FROM (SELECT) AS always
LEFT JOIN (
    SELECT due_at, id FROM message
    WHERE lane = $1 AND due_at >= $2 AND (due_at, id) > ($2, $3) AND due_at <= $4 AND id <> ALL($5)
    ORDER BY due_at, id LIMIT 1
) AS soonest ON true
