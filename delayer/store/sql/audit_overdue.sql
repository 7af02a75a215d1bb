-- Messages due, or to be retried, at $1 or before, by lane, and their age at $2. Those in lanes of the limited routes
-- $3 are reported separately.
SELECT lane, kind, route, messages, first_due AS first_due_ms, (extract(epoch FROM $2 - since) * 1000)::bigint AS late_ms
FROM (
    SELECT m.lane, CASE WHEN l.route = ANY ($3::bytea[]) THEN 'paced' ELSE 'waiting' END AS kind, l.route,
           count(*) AS messages, min(due_at) AS first_due, min(due_at) AS since
    FROM message AS m LEFT JOIN lane AS l ON l.number = m.lane
    WHERE due_at <= $1::timestamptz GROUP BY 1, 2, 3
    UNION ALL
    SELECT lane, 'held', NULL, count(*), min(due_at), min(retry_at) FROM held WHERE retry_at <= $1 GROUP BY 1
) AS late ORDER BY lane, kind
