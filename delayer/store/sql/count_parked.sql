-- Add to counters as count.sql does, if lane $4 is still in epoch $5. Returns nothing if it is not.
--
-- FOR SHARE makes an adopter, who raises the epoch, wait for this transaction, and makes this one see an epoch that was
-- raised: every row that is ever parked under an epoch is visible to the owner of the next one. It stands at the end of
-- the transaction, so that an adopter waits for a commit and not for a COPY.
WITH fence AS (SELECT number FROM lane WHERE number = $4 AND epoch = $5 FOR SHARE)
INSERT INTO counter AS c (lane, kind, n)
SELECT added.lane, added.kind, added.n
FROM fence CROSS JOIN unnest($1::smallint[], $2::text[], $3::bigint[]) AS added (lane, kind, n)
ORDER BY added.lane, added.kind
ON CONFLICT (lane, kind) DO UPDATE SET n = c.n + excluded.n
RETURNING lane
