-- Find faults of segments by their headers: the subject, its fault, messages, first due instant and the lowest ids. $1:
-- segments due before it should be rows; $2: the newest format; $3: the texts of the five faults.
SELECT concat('lane ', lane, ': ', fault), fault, sum(messages)::bigint, min(first_due), (array_agg(id ORDER BY id))[:5]
FROM segment CROSS JOIN unnest(ARRAY[
    CASE WHEN broken_at IS NOT NULL THEN ($3::text[])[1] WHEN first_due < $1 THEN ($3::text[])[2] END,
    CASE WHEN format > $2 THEN ($3::text[])[3] END,
    CASE WHEN first_due > last_due THEN ($3::text[])[4] END,
    CASE WHEN cardinality(ids) <> messages + bit_count(gone) THEN ($3::text[])[5] END
]) AS fault
WHERE fault IS NOT NULL GROUP BY 1, 2 ORDER BY 1
