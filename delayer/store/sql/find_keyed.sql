-- Where the message of key $1 waits: due instant in microseconds, id, lane, and its segment (null: a row).
SELECT (extract(epoch FROM k.due_at) * 1000000)::bigint, k.id, k.lane, k.segment
FROM message_key AS k
LEFT JOIN message AS m ON m.lane = k.lane AND m.due_at = k.due_at AND m.id = k.id
WHERE k.key = $1 AND (k.segment IS NOT NULL OR m.id IS NOT NULL)
