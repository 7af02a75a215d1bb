-- The segments whose first message is due before $1, soonest first. Reads no segment.
SELECT id, lane, first_due, last_due, messages, raw_bytes, octet_length(packed), broken
FROM segment
WHERE first_due < $1
ORDER BY first_due, id
