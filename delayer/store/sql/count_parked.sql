-- Add to counters like count.sql, if lane $4 is still in epoch $5. Otherwise returns nothing.
--
-- A process that takes the lane raises the epoch. FOR SHARE makes it wait for this transaction, and makes this
-- transaction see a raised epoch. So the next owner sees every row parked under an older epoch. This statement is the
-- last of its transaction, so that the next owner waits for a commit, not for a COPY.
WITH fence AS (SELECT number FROM lane WHERE number = $4 AND epoch = $5 FOR SHARE)
INSERT INTO counter AS c (lane, kind, n)
SELECT added.lane, added.kind, added.n
FROM fence CROSS JOIN unnest($1::smallint[], $2::text[], $3::bigint[]) AS added (lane, kind, n)
ORDER BY added.lane, added.kind
ON CONFLICT (lane, kind) DO UPDATE SET n = c.n + excluded.n
RETURNING lane
