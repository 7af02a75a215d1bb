-- All messages without their bytes: waiting rows by lane (start_ms is null) and by hour (lane is null), and held rows
-- and messages in segments by lane. Reads only the indexes of rows.
SELECT lane, 'waiting' AS kind, start_ms, sum(messages)::bigint AS messages, 0::bigint AS size, 0 AS keyed,
       min(first_due) AS first_due_ms, max(last_due) AS last_due_ms
FROM (
    SELECT lane, date_bin('1 hour', due_at, 'epoch') AS start_ms, count(*) AS messages, min(due_at) AS first_due,
           max(due_at) AS last_due
    FROM message GROUP BY 1, 2
) AS hours GROUP BY GROUPING SETS ((lane), (start_ms))
UNION ALL SELECT lane, 'held', NULL, count(*), 0, 0, NULL, NULL FROM held GROUP BY lane
UNION ALL
SELECT lane, 'segment', NULL, sum(messages), sum(raw_bytes)::bigint, 0, min(first_due), max(last_due)
FROM segment GROUP BY lane
