-- Messages by destination, and all of them (to_key is null), on $1 per cent of the pages of waiting and of held rows.
SELECT to_exchange, to_key, count(*) AS messages, count(*) FILTER (WHERE waits) AS waiting, count(key) AS keyed,
       coalesce(sum(size), 0) AS size, min(due_at) AS due_ms, min(due_at) FILTER (WHERE waits) AS first_due_ms,
       max(due_at) FILTER (WHERE waits) AS last_due_ms
FROM (
    SELECT true AS waits, due_at, to_exchange, to_key, key, octet_length(properties) + octet_length(body) AS size
    FROM message TABLESAMPLE SYSTEM ($1)
    UNION ALL
    SELECT false, due_at, to_exchange, to_key, key, octet_length(properties) + octet_length(body)
    FROM held TABLESAMPLE SYSTEM ($1)
) AS sampled GROUP BY GROUPING SETS ((to_exchange, to_key), ()) ORDER BY to_key IS NULL, waiting DESC
