"""Held messages that were published before they were held, out of the cascade or at once, keep their ``x-delayer-id``.

Frozen: it says what was done to stores that exist, so it never imports delayer/store/tables.py.
"""

from __future__ import annotations

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


# The schema before this one has no place for them, and their copies would not be known. Nobody may hold one more
# between the look and the dropping: the lock is taken first.
REFUSE = """
DO $$
DECLARE
    n bigint;
BEGIN
    LOCK TABLE held IN ACCESS EXCLUSIVE MODE;
    SELECT count(*) INTO n FROM held WHERE token IS NOT NULL;
    IF n > 0 THEN
        RAISE EXCEPTION '% held messages keep an x-delayer-id, and schema 0004 has no place for it: retry or drop them',
            n;
    END IF;
END $$
"""


def upgrade() -> None:
    # Without a default: nothing is rewritten, and daemons of the version before go on writing rows without it.
    op.execute("ALTER TABLE held ADD COLUMN token bytea")


def downgrade() -> None:
    op.execute(REFUSE)
    op.execute("ALTER TABLE held DROP COLUMN token")
