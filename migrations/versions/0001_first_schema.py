"""The first schema: messages partitioned by due time, held ones, keys, lanes, counters.

Frozen: it says what was done to stores that exist, so it never imports delayer/store/tables.py.
"""

from __future__ import annotations

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# A partition's dead rows are cleaned by their number, not by their share: a partition that a million rows a minute pass
# through must not wait for a fifth of its size. Truncating would lock out the traffic for nothing.
ROWS_THAT_CHURN = "autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 50000, vacuum_truncate = off"
# A handful of rows updated at every commit: room on the page keeps the updates out of the index.
ROWS_THAT_COUNT = "fillfactor = 10, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000"

UP = f"""
CREATE SEQUENCE message_id AS bigint;

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
    id          bigint      NOT NULL,
    due_at      timestamptz NOT NULL,
    parked_at   timestamptz NOT NULL DEFAULT now(),
    held_at     timestamptz NOT NULL DEFAULT now(),
    retry_at    timestamptz NOT NULL,
    checksum    bigint      NOT NULL,
    attempts    integer     NOT NULL,
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
    reason      text        NOT NULL,
    CONSTRAINT held_pkey PRIMARY KEY (id)
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
    watermark timestamptz NOT NULL DEFAULT '-infinity',
    CONSTRAINT lane_pkey PRIMARY KEY (number)
);

CREATE TABLE counter (
    lane smallint NOT NULL,
    kind text     NOT NULL,
    n    bigint   NOT NULL,
    CONSTRAINT counter_pkey PRIMARY KEY (lane, kind)
) WITH ({ROWS_THAT_COUNT});
"""

DOWN = """
DROP TABLE counter;
DROP TABLE lane;
DROP TABLE message_key;
DROP TABLE held;
DROP TABLE message;
DROP SEQUENCE message_id;
"""


def upgrade() -> None:
    for statement in UP.split(";\n"):
        if statement.strip():
            op.execute(statement)


def downgrade() -> None:
    for statement in DOWN.split(";\n"):
        if statement.strip():
            op.execute(statement)
