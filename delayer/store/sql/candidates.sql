-- The segments that may hold one of the messages $1, by their range of ids, with the first $2 and the last $3 bytes of
-- each: there stand the ids, and what it takes to read them. $4 is the last segment that was looked at, $5 how many; $6 and $7
-- bounds of the messages' due instants, as far as they are known.
SELECT s.id, s.format, s.first_id, s.last_id, octet_length(s.packed) AS size,
       substring(s.packed FROM 1 FOR $2) AS head,
       substring(s.packed FROM greatest(octet_length(s.packed) - $3::int + 1, 1)) AS tail
FROM segment AS s
WHERE s.id > $4 AND s.first_due <= $7 AND s.last_due >= $6
  AND EXISTS (SELECT FROM unnest($1::bigint[]) AS wanted WHERE wanted BETWEEN s.first_id AND s.last_id)
ORDER BY s.id
LIMIT $5
