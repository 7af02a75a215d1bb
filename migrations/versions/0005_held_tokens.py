"""Held messages that were published before they were held, out of the cascade or at once, keep their ``x-delayer-id``.

Frozen: it says what was done to stores that exist, so it never imports delayer/store/tables.py.
"""

from __future__ import annotations

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Without a default: nothing is rewritten, and daemons of the version before go on writing rows without it.
    op.execute("ALTER TABLE held ADD COLUMN token bytea")


def downgrade() -> None:
    op.execute("ALTER TABLE held DROP COLUMN token")
