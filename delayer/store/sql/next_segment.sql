-- The due instants of the first and last message of the soonest segment. Reads one index entry, and those of broken
-- segments before it, which are few, because each raises an alarm.
SELECT first_due, last_due FROM segment WHERE broken_at IS NULL ORDER BY first_due LIMIT 1
