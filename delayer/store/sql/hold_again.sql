-- Hold rows again that their destination refused once more. $1 ids, $2 kinds, $3 texts, $4 may_be_delivered, $5
-- isolated, $6 times of the next attempt (null: an operator decides).
UPDATE held AS h
SET attempts = h.attempts + 1, kind = again.kind, reason = again.reason, may_be_delivered = again.may_be_delivered,
    isolated = again.isolated, retry_at = again.retry_at
FROM unnest($1::bigint[], $2::text[], $3::text[], $4::boolean[], $5::boolean[], $6::timestamptz[])
     AS again (id, kind, reason, may_be_delivered, isolated, retry_at)
WHERE h.id = again.id
