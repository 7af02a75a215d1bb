"""Segments: runs of far-future messages, compacted and compressed.

Frozen: it says what was done to stores that exist, so it never imports delayer/store/tables.py.
"""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

UP = """
CREATE SEQUENCE segment_id AS bigint;

CREATE TABLE segment (
    id        bigint      NOT NULL DEFAULT nextval('segment_id'),
    lane      smallint    NOT NULL,
    first_due timestamptz NOT NULL,
    last_due  timestamptz NOT NULL,
    first_id  bigint      NOT NULL,
    last_id   bigint      NOT NULL,
    messages  integer     NOT NULL,
    cancelled integer     NOT NULL DEFAULT 0,
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

CREATE TABLE segment_cancelled (
    segment bigint NOT NULL,
    id      bigint NOT NULL,
    CONSTRAINT segment_cancelled_pkey PRIMARY KEY (segment, id)
);
"""

# The schema before this one has no place for what stands in a segment, so it must be empty. Nobody may fill one between
# the look and the dropping: the lock is taken first.
REFUSE = """
DO $$
DECLARE
    n bigint;
    m bigint;
BEGIN
    LOCK TABLE segment, segment_cancelled IN ACCESS EXCLUSIVE MODE;
    SELECT count(*), coalesce(sum(messages - cancelled), 0) INTO n, m FROM segment;
    IF n > 0 THEN
        RAISE EXCEPTION '% messages stand in % segments, which schema 0001 cannot keep: `delayer restore` first',
            m, n;
    END IF;
END $$
"""

DOWN = """
DROP TABLE segment_cancelled;
DROP TABLE segment;
DROP SEQUENCE segment_id;
"""


def upgrade() -> None:
    for statement in UP.split(";\n"):
        if statement.strip():
            op.execute(statement)


def downgrade() -> None:
    op.execute(REFUSE)
    for statement in DOWN.split(";\n"):
        if statement.strip():
            op.execute(statement)
