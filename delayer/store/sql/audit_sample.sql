-- Messages by destination, and all of them (to_key is null), from a share $1 of the pages of waiting rows, and a share
-- $2 of those of held rows. Each row also stands for the unread rows of its kind.
SELECT to_exchange, to_key, sum(weight) AS messages, coalesce(sum(weight) FILTER (WHERE waits), 0) AS waiting,
       coalesce(sum(weight) FILTER (WHERE key IS NOT NULL), 0) AS keyed, coalesce(sum(weight * size), 0) AS size,
       min(due_at) AS due_ms, min(due_at) FILTER (WHERE waits) AS first_due_ms,
       max(due_at) FILTER (WHERE waits) AS last_due_ms
FROM (
    SELECT true AS waits, 1 / $1::float8 AS weight, due_at, to_exchange, to_key, key,
           octet_length(properties) + octet_length(body) AS size
    FROM message TABLESAMPLE SYSTEM (100 * $1::float8)
    UNION ALL
    SELECT false, 1 / $2::float8, due_at, to_exchange, to_key, key, octet_length(properties) + octet_length(body)
    FROM held TABLESAMPLE SYSTEM (100 * $2::float8)
) AS sampled GROUP BY GROUPING SETS ((to_exchange, to_key), ()) ORDER BY to_key IS NULL, waiting DESC
