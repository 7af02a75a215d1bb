-- $1 lane, $2 and $3 first and last due instant (epoch microseconds, exact up to the year 2255), $4 and $5 lowest and
-- highest id, $6 messages, $7 bytes before packing, $8 format, $9 digest, $10 packed.
INSERT INTO segment (lane, first_due, last_due, first_id, last_id, messages, raw_bytes, format, digest, packed)
VALUES ($1, 'epoch'::timestamptz + $2::bigint * interval '1 microsecond',
        'epoch'::timestamptz + $3::bigint * interval '1 microsecond', $4, $5, $6, $7, $8, $9, $10)
RETURNING id
