"""The first schema.

Frozen from the first release on: it says what was done to stores that exist. It imports nothing of delayer.

Byte strings that are only carried are ``bytea``: AMQP's need not be text. Bodies are stored uncompressed. Postgres's
default, pglz, costs more parking time than the disk is worth: 4 KB of JSON were parked at 13 k rows/s with it (3.1 KB a
row on disk), and at 26 to 35 k/s without (5.8 KB). lz4 is as fast as none and as small as pglz, but not every server
has it. Bodies under 2 KB stay in their row. Partitions copy this setting.
"""

from __future__ import annotations

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# Autovacuum cleans a partition by its number of dead rows, not by their share: a partition that a million rows a minute
# pass through must not wait for a fifth of its size. A truncation would lock out the traffic for nothing.
ROWS_THAT_CHURN = "autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 50000, vacuum_truncate = off"
# A handful of rows, updated at every commit: room on the page keeps the updates out of the index.
ROWS_THAT_COUNT = "fillfactor = 10, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000"

UP = f"""
CREATE SEQUENCE message_id AS bigint;
CREATE SEQUENCE segment_id AS bigint;
CREATE SEQUENCE audit_log_id AS bigint;
CREATE SEQUENCE import_run_id AS bigint;

-- A waiting message, partitioned by its due day. id is the order of arrival.
CREATE TABLE message (
    id          bigint      NOT NULL DEFAULT nextval('message_id'),
    due_at      timestamptz NOT NULL,
    parked_at   timestamptz NOT NULL DEFAULT now(),
    checksum    bigint      NOT NULL,
    lane        smallint    NOT NULL,
    format      smallint    NOT NULL,
    route       bytea       NOT NULL,
    exchange    bytea       NOT NULL,
    routing_key bytea       NOT NULL,
    to_exchange bytea       NOT NULL,
    to_key      bytea       NOT NULL,
    properties  bytea       NOT NULL,
    body        bytea       NOT NULL,
    key         bytea,
    CONSTRAINT message_pkey PRIMARY KEY (lane, due_at, id)
) PARTITION BY RANGE (due_at);
ALTER TABLE message ALTER COLUMN body SET STORAGE EXTERNAL, ALTER COLUMN properties SET STORAGE EXTERNAL;
-- For a command that has an id without its due instant. New ids go to the end of the index, so a park pays for it only
-- with 8 % more WAL.
CREATE INDEX message_by_id ON message (id);

CREATE TABLE message_default PARTITION OF message DEFAULT WITH ({ROWS_THAT_CHURN});

-- A message that its destination did not take. kind, reason, may_be_delivered and isolated are those of a Hold
-- (core/hold.py). retry_at is the daemon's next attempt (null: a person decides). token is the x-delayer-id of a
-- message that was published before it was held.
CREATE TABLE held (
    id               bigint      NOT NULL,
    due_at           timestamptz NOT NULL,
    parked_at        timestamptz NOT NULL DEFAULT now(),
    held_at          timestamptz NOT NULL DEFAULT now(),
    retry_at         timestamptz,
    attempts         integer     NOT NULL,
    checksum         bigint      NOT NULL,
    lane             smallint    NOT NULL,
    format           smallint    NOT NULL,
    route            bytea       NOT NULL,
    exchange         bytea       NOT NULL,
    routing_key      bytea       NOT NULL,
    to_exchange      bytea       NOT NULL,
    to_key           bytea       NOT NULL,
    properties       bytea       NOT NULL,
    body             bytea       NOT NULL,
    key              bytea,
    kind             text        NOT NULL,
    reason           text        NOT NULL,
    may_be_delivered boolean     NOT NULL,
    isolated         boolean     NOT NULL,
    token            bytea,
    CONSTRAINT held_pkey PRIMARY KEY (id),
    CONSTRAINT held_kind CHECK (kind IN ('returned', 'nacked', 'unanswered', 'closed_channel', 'closed_connection',
                                         'late', 'unfit'))
);
ALTER TABLE held ALTER COLUMN body SET STORAGE EXTERNAL, ALTER COLUMN properties SET STORAGE EXTERNAL;
CREATE INDEX held_lane_retry_at ON held (lane, retry_at, id);

-- The message that a key (header x-delay-key) stands for at present. segment: the one that holds the message. It and
-- the columns after it are null for a row. position: where the message is in segment.ids, from 0. The others have what
-- the history says of a cancelled message, because a daemon does not unpack a segment for a cancel. size: bytes of body
-- and properties.
CREATE TABLE message_key (
    key         bytea       NOT NULL,
    lane        smallint    NOT NULL,
    due_at      timestamptz NOT NULL,
    id          bigint      NOT NULL,
    segment     bigint,
    position    integer,
    parked_at   timestamptz,
    route       bytea,
    to_exchange bytea,
    to_key      bytea,
    size        integer,
    CONSTRAINT message_key_pkey PRIMARY KEY (key)
);

-- A recurring schedule. Its next occurrence waits as the message waiting_id, under the key 'delayer.schedule/' and the
-- name. Either cron and zone or period_ms is the rhythm, from first_at to last_at. Instants of the rhythm are without
-- the jitter: waiting_at, of the occurrence that waits, and settled_at, of the one before. made counts the occurrences
-- that were sent, the last of them at made_at, late_ms after it was due; missed counts those that never were. why: of
-- the states ended and failed. The collation is that of Python, by which batches are ordered.
CREATE TABLE schedule (
    name        text        COLLATE "C" NOT NULL,
    id          uuid        NOT NULL,
    state       text        NOT NULL,
    why         text        NOT NULL,
    cron        text,
    zone        text,
    period_ms   bigint,
    first_at    timestamptz NOT NULL,
    last_at     timestamptz,
    catch_up    integer     NOT NULL,
    jitter_ms   bigint      NOT NULL,
    max         bigint,
    to_exchange bytea       NOT NULL,
    to_key      bytea       NOT NULL,
    properties  bytea       NOT NULL,
    body        bytea       NOT NULL,
    made        bigint      NOT NULL,
    missed      bigint      NOT NULL,
    settled_at  timestamptz,
    waiting_at  timestamptz,
    waiting_id  bigint,
    made_at     timestamptz,
    late_ms     bigint,
    added_at    timestamptz NOT NULL DEFAULT now(),
    changed_at  timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT schedule_pkey PRIMARY KEY (name),
    CONSTRAINT schedule_id_key UNIQUE (id),
    CONSTRAINT schedule_state CHECK (state IN ('active', 'paused', 'ended', 'failed')),
    CONSTRAINT schedule_rhythm CHECK ((cron IS NULL) = (zone IS NULL) AND (cron IS NULL) <> (period_ms IS NULL)),
    CONSTRAINT schedule_waiting CHECK ((waiting_id IS NULL) = (waiting_at IS NULL)
                                       AND (waiting_id IS NULL) = (state <> 'active'))
) WITH (fillfactor = 70, {ROWS_THAT_CHURN});
ALTER TABLE schedule ALTER COLUMN body SET STORAGE EXTERNAL;
CREATE INDEX schedule_state_name ON schedule (state, name);

-- epoch grows with every change of owner and fences off the parks of the last one. watermark is the instant where the
-- next owner begins. route is the limited route that the lane belongs to.
CREATE TABLE lane (
    number    smallint    NOT NULL,
    epoch     bigint      NOT NULL,
    owner     text        NOT NULL,
    watermark timestamptz NOT NULL DEFAULT '-infinity',
    route     bytea,
    CONSTRAINT lane_pkey PRIMARY KEY (number),
    CONSTRAINT lane_route_key UNIQUE (route)
);

-- One row. intake grows with every process that begins to apply operations with keys, and fences off those of the
-- process before. has_broker: the store belongs to a broker, the one with the exchange delayer.store.<id>.
-- zone_version: the oldest zone data by which a waiting occurrence may have been computed.
CREATE TABLE store (
    id           text    NOT NULL DEFAULT replace(gen_random_uuid()::text, '-', ''),
    has_broker   boolean NOT NULL DEFAULT false,
    intake       bigint  NOT NULL DEFAULT 0,
    zone_version text    NOT NULL DEFAULT ''
);
INSERT INTO store DEFAULT VALUES;

-- A number of messages for each lane and kind of event. at is when another transaction than a park last changed it: for
-- kinds released and held, when the lane last advanced.
CREATE TABLE counter (
    lane smallint NOT NULL,
    kind text     NOT NULL,
    n    bigint   NOT NULL,
    at   timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT counter_pkey PRIMARY KEY (lane, kind)
) WITH ({ROWS_THAT_COUNT});

-- A run of far-future messages of one lane, compacted (segments/codec.py). broken is the reason why it did not read
-- back. packed is a Parquet file, compressed already, and is stored as it is; digest is its SHA-256. ids are those of
-- the messages in it, in their order. gone has a bit for each (as get_bit counts them; none after the last 1): 1 if the
-- message was cancelled by its key since. messages and raw_bytes are of the others. A shorter list of ids would cost
-- each cancel 80 kB.
CREATE TABLE segment (
    id        bigint      NOT NULL DEFAULT nextval('segment_id'),
    lane      smallint    NOT NULL,
    first_due timestamptz NOT NULL,
    last_due  timestamptz NOT NULL,
    ids       bigint[]    NOT NULL,
    gone      bytea       NOT NULL DEFAULT '',
    messages  integer     NOT NULL,
    raw_bytes bigint      NOT NULL,
    format    smallint    NOT NULL,
    digest    bytea       NOT NULL,
    packed    bytea       NOT NULL,
    made_at   timestamptz NOT NULL DEFAULT now(),
    broken_at timestamptz,
    broken    text,
    CONSTRAINT segment_pkey PRIMARY KEY (id)
);
ALTER TABLE segment ALTER COLUMN packed SET STORAGE EXTERNAL;
CREATE INDEX segment_first_due ON segment (first_due);

-- What was released, held and cancelled, if daemons keep a history; partitioned by the day of the change. late_ms: how
-- long after its due instant. delay_ms: from parking to the due instant (null: unknown). size: bytes of body and
-- properties. kind: that of the hold. schedule: the one that made the message, if any.
CREATE TABLE history (
    at          timestamptz NOT NULL DEFAULT statement_timestamp(),
    what        text        NOT NULL,
    id          bigint,
    route       bytea       NOT NULL,
    to_exchange bytea       NOT NULL,
    to_key      bytea       NOT NULL,
    due_at      timestamptz NOT NULL,
    late_ms     bigint      NOT NULL,
    delay_ms    bigint,
    size        integer     NOT NULL,
    kind        text,
    schedule    text,
    CONSTRAINT history_what CHECK (what IN ('released', 'held', 'cancelled'))
) PARTITION BY RANGE (at);

CREATE TABLE history_default PARTITION OF history DEFAULT;

-- Actions of people by hand: who, when, what, on how many messages, and the request (as JSON).
CREATE TABLE audit_log (
    id       bigint      NOT NULL DEFAULT nextval('audit_log_id'),
    at       timestamptz NOT NULL DEFAULT now(),
    who      text        NOT NULL,
    verb     text        NOT NULL,
    messages bigint      NOT NULL,
    asked    text        NOT NULL,
    CONSTRAINT audit_log_pkey PRIMARY KEY (id)
);

-- Requests over HTTP with an Idempotency-Key, for a day. key and content: SHA-256 of the key with the name of its
-- token, and of the request. answer: JSON.
CREATE TABLE request (
    key     bytea       NOT NULL,
    content bytea       NOT NULL,
    answer  text        NOT NULL,
    at      timestamptz NOT NULL DEFAULT statement_timestamp(),
    CONSTRAINT request_pkey PRIMARY KEY (key)
);
CREATE INDEX request_at ON request (at);

-- An import: its source, its parameters (JSON, without passwords), its progress. progress is the note by which its
-- source goes on behind the last commit. One at a time is open (ended_at is null).
CREATE TABLE import_run (
    id         bigint      NOT NULL DEFAULT nextval('import_run_id'),
    began_at   timestamptz NOT NULL DEFAULT now(),
    ended_at   timestamptz,
    who        text        NOT NULL,
    source     text        NOT NULL,
    parameters text        NOT NULL,
    phase      text        NOT NULL,
    staged     bigint,
    parked     bigint      NOT NULL DEFAULT 0,
    held       bigint      NOT NULL DEFAULT 0,
    superseded bigint      NOT NULL DEFAULT 0,
    progress   text,
    CONSTRAINT import_run_pkey PRIMARY KEY (id)
);
CREATE UNIQUE INDEX import_run_open ON import_run ((ended_at IS NULL)) WHERE ended_at IS NULL;

-- The places of records in a file that is being imported, in the order of their due instants.
CREATE TABLE import_item (
    run      bigint  NOT NULL,
    due_ms   bigint  NOT NULL,
    position bigint  NOT NULL,
    size     integer NOT NULL,
    CONSTRAINT import_item_pkey PRIMARY KEY (run, due_ms, position)
);
"""


def upgrade() -> None:
    for statement in UP.split(";\n"):
        if statement.strip():
            op.execute(statement)
