-- Write down where the next owner of lane $1 starts to look, unless a park holds the row just now. $2 watermark; $3 the
-- epoch of the writer: another process may have the lane by now.
UPDATE lane SET watermark = $2
WHERE number = (SELECT number FROM lane WHERE number = $1 AND epoch = $3 FOR UPDATE SKIP LOCKED)
