-- When the daemon retries the next held row of one lane. $1 lane.
SELECT retry_at FROM held WHERE lane = $1 AND retry_at IS NOT NULL ORDER BY retry_at LIMIT 1
