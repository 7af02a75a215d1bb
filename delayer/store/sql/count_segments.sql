-- Count all segments and their messages, and the broken ones and theirs. Also returns the next due instant of the rest.
SELECT count(*), coalesce(sum(messages), 0)::bigint, count(*) FILTER (WHERE broken_at IS NOT NULL),
       coalesce(sum(messages) FILTER (WHERE broken_at IS NOT NULL), 0)::bigint,
       min(first_due) FILTER (WHERE broken_at IS NULL)
FROM segment
