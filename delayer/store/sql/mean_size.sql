-- The mean size of the first rows of a window, in bytes of body and properties. The bounds as in lock_run.sql.
SELECT avg(octet_length(body) + octet_length(properties))::float8
FROM (
    SELECT body, properties
    FROM message
    WHERE lane = $1 AND (due_at, id) >= ($2, $3) AND (due_at, id) < ($4, $5) AND due_at >= $2 AND due_at < $6
      AND key IS NULL
    ORDER BY due_at, id
    LIMIT 100
) AS first
