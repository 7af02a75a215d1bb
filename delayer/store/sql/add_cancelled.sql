-- Note that messages $2 of segment $1 were cancelled. Returns those that were not noted before.
INSERT INTO segment_cancelled (segment, id)
SELECT $1, id FROM unnest($2::bigint[]) AS id ORDER BY id
ON CONFLICT DO NOTHING
RETURNING id
