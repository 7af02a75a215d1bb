-- Save where the next owner of lane $1 begins, unless a park has the row locked. $2 watermark; $3 the writer's epoch,
-- because another process may have the lane by now.
UPDATE lane SET watermark = $2
WHERE number = (SELECT number FROM lane WHERE number = $1 AND epoch = $3 FOR UPDATE SKIP LOCKED)
