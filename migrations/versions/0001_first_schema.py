"""The first schema.

Frozen from the first release on: it says what was done to stores that exist. It never imports
delayer/store/upgrades.py.
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

CREATE TABLE message_default PARTITION OF message DEFAULT WITH ({ROWS_THAT_CHURN});

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

CREATE TABLE message_key (
    key    bytea       NOT NULL,
    lane   smallint    NOT NULL,
    due_at timestamptz NOT NULL,
    id     bigint      NOT NULL,
    CONSTRAINT message_key_pkey PRIMARY KEY (key)
);

CREATE TABLE lane (
    number    smallint    NOT NULL,
    epoch     bigint      NOT NULL,
    owner     text        NOT NULL,
    broker    text        NOT NULL DEFAULT '',
    watermark timestamptz NOT NULL DEFAULT '-infinity',
    route     bytea,
    CONSTRAINT lane_pkey PRIMARY KEY (number),
    CONSTRAINT lane_route_key UNIQUE (route)
);

CREATE TABLE counter (
    lane smallint NOT NULL,
    kind text     NOT NULL,
    n    bigint   NOT NULL,
    CONSTRAINT counter_pkey PRIMARY KEY (lane, kind)
) WITH ({ROWS_THAT_COUNT});

CREATE TABLE segment (
    id        bigint      NOT NULL DEFAULT nextval('segment_id'),
    lane      smallint    NOT NULL,
    first_due timestamptz NOT NULL,
    last_due  timestamptz NOT NULL,
    first_id  bigint      NOT NULL,
    last_id   bigint      NOT NULL,
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

CREATE TABLE audit_log (
    id       bigint      NOT NULL DEFAULT nextval('audit_log_id'),
    at       timestamptz NOT NULL DEFAULT now(),
    who      text        NOT NULL,
    verb     text        NOT NULL,
    messages bigint      NOT NULL,
    asked    text        NOT NULL,
    CONSTRAINT audit_log_pkey PRIMARY KEY (id)
);

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
