-- Write down where the next owner of lane $1 starts to look, unless a park holds the row just now. $2 watermark.
UPDATE lane SET watermark = $2 WHERE number = (SELECT number FROM lane WHERE number = $1 FOR UPDATE SKIP LOCKED)
