-- The segments whose first message is due before $1, soonest first, $2 at most (null: all). No segment is read.
SELECT id, lane, first_due, last_due, messages, raw_bytes, octet_length(packed), broken
FROM segment
WHERE first_due < $1
ORDER BY first_due, id
LIMIT $2
