-- Held rows whose destination would not take them this time either. $1 ids, $2 reasons, $3 times of the next attempt.
UPDATE held AS h
SET attempts = h.attempts + 1, reason = again.reason, retry_at = again.retry_at
FROM unnest($1::bigint[], $2::text[], $3::timestamptz[]) AS again (id, reason, retry_at)
WHERE h.id = again.id
