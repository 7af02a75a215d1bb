-- When the next row of one lane is due, if it is before $3. $1 lane, $2 watermark. One index entry is read.
SELECT due_at FROM message WHERE lane = $1 AND due_at >= $2 AND due_at <= $3 ORDER BY due_at LIMIT 1
