-- Take the rows of one lane due within the window, soonest first, bounded by count and bytes.
--
-- $1 lane, $2 and $3 the place (due instant, id) after which to look, $4 horizon (our estimate of the store's now plus
-- a minute, only to prune partitions while planning), $5 ids that another open claim has locked, so that this claim
-- does not wait for them. $6 window in milliseconds, $7 rows, $8 bytes. The last row may exceed $8 by a megabyte at
-- most, so the claim is empty if the first row is larger. statement_timestamp() decides what is due.
--
-- The rows are deleted by their place (tableoid, ctid), which the inner select already has: 4.0 ms for 1,000 rows with
-- 1 M waiting, against 7.0 ms when each is looked up in the index again. The conditions are repeated outside for two
-- reasons: they prune the outer partitions, and recheck a row that has changed since.
DELETE FROM message AS m
USING (
    SELECT part, place
    FROM (
        SELECT part, place,
               sum(size) OVER (ORDER BY due_at, id ROWS UNBOUNDED PRECEDING) AS upto, size
        FROM (
            SELECT tableoid AS part, ctid AS place, due_at, id,
                   octet_length(body) + octet_length(properties) AS size
            FROM message
            WHERE lane = $1 AND due_at >= $2 AND (due_at, id) > ($2, $3) AND due_at <= $4
              AND due_at <= statement_timestamp() + $6 * interval '1 millisecond' AND id <> ALL($5)
            ORDER BY due_at, id
            LIMIT $7
        ) AS soonest
    ) AS summed
    WHERE upto - size < $8 AND upto <= $8 + 1048576
) AS batch
WHERE m.ctid = batch.place AND m.tableoid = batch.part
  AND m.lane = $1 AND m.due_at >= $2 AND m.due_at <= $4
  AND m.due_at <= statement_timestamp() + $6 * interval '1 millisecond'
RETURNING m.id, m.due_at, m.checksum, m.format, m.route, m.exchange, m.routing_key,
          m.to_exchange, m.to_key, m.properties, m.body, m.key, m.parked_at
