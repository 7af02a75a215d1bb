-- The daemons' activity: the lanes they own, and how much they have parked and released so far.
SELECT (extract(epoch FROM clock_timestamp()) * 1000)::float8,
       (SELECT coalesce(array_agg(l.number), '{}')
        FROM lane AS l
        WHERE EXISTS (
            SELECT FROM pg_locks AS k
            WHERE k.locktype = 'advisory' AND k.granted AND k.objsubid = 2
              AND k.database = (SELECT oid FROM pg_database WHERE datname = current_database())
              AND k.classid = 'lane'::regclass AND k.objid = l.number::int::oid
        )),
       (SELECT coalesce(sum(n), 0)::bigint FROM counter WHERE kind IN ('parked', 'released'))
