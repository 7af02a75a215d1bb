-- Delete the packed rows, which we have locked: ids $4 in lane $1, due from $2 to before $3.
DELETE FROM message
WHERE lane = $1 AND due_at >= $2 AND due_at < $3 AND id = ANY($4::bigint[])
