-- The mean size of the first rows of lane $1 due from $2 to before $3, in bytes of body and properties.
SELECT avg(octet_length(body) + octet_length(properties))::float8
FROM (
    SELECT body, properties
    FROM message
    WHERE lane = $1 AND due_at >= $2 AND due_at < $3
    ORDER BY due_at, id
    LIMIT 100
) AS first
