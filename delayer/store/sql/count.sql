-- Add to counters, in the order of their key to avoid deadlocks. Also record the instant, from which stats.py finds
-- out when the lane last advanced. $1 lanes, $2 kinds, $3 numbers.
INSERT INTO counter AS c (lane, kind, n)
SELECT lane, kind, n FROM unnest($1::smallint[], $2::text[], $3::bigint[]) AS added (lane, kind, n) ORDER BY lane, kind
ON CONFLICT (lane, kind) DO UPDATE SET n = c.n + excluded.n, at = statement_timestamp()
