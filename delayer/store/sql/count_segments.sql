-- All segments: how many, the messages in them that were not cancelled, the same of those that do not read back (marked, or
-- of a newer format than $1), and of the others the next due instant.
SELECT count(*), coalesce(sum(messages - cancelled), 0)::bigint, count(*) FILTER (WHERE doubtful),
       coalesce(sum(messages - cancelled) FILTER (WHERE doubtful), 0)::bigint,
       min(first_due) FILTER (WHERE NOT doubtful)
FROM (SELECT messages, cancelled, first_due, broken_at IS NOT NULL OR format > $1 AS doubtful FROM segment) AS s
