"""Acts: who cancelled, rescheduled, retried or dropped how many messages, and when.

Frozen: it says what was done to stores that exist, so it never imports delayer/store/tables.py.
"""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("CREATE SEQUENCE act_id AS bigint")
    op.execute(
        """
        CREATE TABLE act (
            id       bigint      NOT NULL DEFAULT nextval('act_id'),
            at       timestamptz NOT NULL DEFAULT now(),
            who      text        NOT NULL,
            verb     text        NOT NULL,
            messages bigint      NOT NULL,
            asked    text        NOT NULL,
            CONSTRAINT act_pkey PRIMARY KEY (id)
        )
        """
    )


def downgrade() -> None:
    op.execute("DROP TABLE act")
    op.execute("DROP SEQUENCE act_id")
