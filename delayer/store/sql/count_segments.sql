-- All segments: how many, the messages in them that were not cancelled, the same of broken ones, the next due instant.
SELECT count(*), coalesce(sum(messages - cancelled), 0)::bigint, count(broken_at),
       coalesce(sum(messages - cancelled) FILTER (WHERE broken_at IS NOT NULL), 0)::bigint,
       min(first_due) FILTER (WHERE broken_at IS NULL)
FROM segment
