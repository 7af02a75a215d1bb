"""How Alembic runs the schema upgrades: on the connection that store/upgrades.py hands over, in one transaction.

Two daemons or operators that upgrade at once take turns by an advisory lock, taken before Alembic reads the version.
The first upgrade has no table to name the lock after.
"""

from __future__ import annotations

from alembic import context
from sqlalchemy import text

VERSION_TABLE = "delayer_schema_version"

connection = context.config.attributes.get("connection")
if connection is None:
    raise RuntimeError("run schema upgrades by `delayer db upgrade`: Alembic's own command line has no connection here")

context.configure(connection=connection, version_table=VERSION_TABLE, transaction_per_migration=False)
with context.begin_transaction():
    table = "coalesce(to_regclass('delayer_schema_version')::oid::int, hashtext('delayer schema upgrade'))"
    connection.execute(text(f"SELECT pg_advisory_xact_lock({table}, 0)"))
    context.run_migrations()
