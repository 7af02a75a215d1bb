-- When the next held row of one lane is tried again. $1 lane.
SELECT retry_at FROM held WHERE lane = $1 ORDER BY retry_at LIMIT 1
