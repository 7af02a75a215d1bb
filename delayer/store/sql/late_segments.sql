-- Count the segments whose first message is due before $1, and their messages. They are few, and found by the index.
-- Unreadable segments are counted separately.
SELECT count(*), coalesce(sum(messages), 0)::bigint, min(first_due)
FROM segment WHERE first_due < $1 AND broken_at IS NULL
