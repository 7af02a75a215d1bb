"""Legacy imports: how far each is, and which records of a file are still to come.

Frozen: it says what was done to stores that exist, so it never imports delayer/store/tables.py.
"""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("CREATE SEQUENCE import_run_id AS bigint")
    op.execute(
        """
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
        )
        """
    )
    # One at a time.
    op.execute("CREATE UNIQUE INDEX import_run_open ON import_run ((ended_at IS NULL)) WHERE ended_at IS NULL")
    op.execute(
        """
        CREATE TABLE import_item (
            run      bigint  NOT NULL,
            due_ms   bigint  NOT NULL,
            position bigint  NOT NULL,
            size     integer NOT NULL,
            CONSTRAINT import_item_pkey PRIMARY KEY (run, due_ms, position)
        )
        """
    )


def downgrade() -> None:
    op.execute("DROP TABLE import_item")
    op.execute("DROP TABLE import_run")
    op.execute("DROP SEQUENCE import_run_id")
