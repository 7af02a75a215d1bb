-- $1 lane, $2 and $3 first and last due instant, $4 ids, $5 messages, $6 bytes before packing, $7 format, $8 digest, $9 packed.
INSERT INTO segment (lane, first_due, last_due, ids, messages, raw_bytes, format, digest, packed)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)
RETURNING id
