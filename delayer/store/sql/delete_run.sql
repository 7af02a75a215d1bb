-- Delete the rows that were packed: those of ids $4 in lane $1, due from $2 to before $3. They are locked by us.
DELETE FROM message
WHERE lane = $1 AND due_at >= $2 AND due_at < $3 AND id = ANY($4::bigint[])
