-- All segments: how many, the messages in them, the same of the broken ones, and of the others the
-- next due instant.
SELECT count(*), coalesce(sum(messages), 0)::bigint, count(*) FILTER (WHERE broken_at IS NOT NULL),
       coalesce(sum(messages) FILTER (WHERE broken_at IS NOT NULL), 0)::bigint,
       min(first_due) FILTER (WHERE broken_at IS NULL)
FROM segment
