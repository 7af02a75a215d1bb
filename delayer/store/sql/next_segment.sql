-- The due instants of the first and last message of the soonest segment. One index entry is read, and those of broken
-- segments before it: few, as each is an alarm.
SELECT first_due, last_due FROM segment WHERE broken_at IS NULL ORDER BY first_due LIMIT 1
