"""The rights on the store that a daemon needs, as docs/security.md grants them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from delayer.store.session import opened

RIGHTS: Final[Mapping[str, str]] = {
    "SCHEMA public": "USAGE, CREATE",
    "message": "OWNER",
    "message_default": "SELECT, DELETE",
    "held": "SELECT, INSERT, UPDATE, DELETE",
    "message_key": "SELECT, INSERT, UPDATE, DELETE",
    "lane": "SELECT, INSERT, UPDATE",
    "store": "SELECT, UPDATE",
    "counter": "SELECT, INSERT, UPDATE",
    "delayer_schema_version": "SELECT",
    "SEQUENCE message_id": "USAGE",
    "segment": "SELECT, UPDATE, DELETE",
}
OF_HISTORY: Final[Mapping[str, str]] = {"history": "OWNER", "history_default": "SELECT, DELETE"}

# The roles of live daemons; without any, the one that asks. Only the named function of a CASE is called.
_MISSING: Final = """
WITH live AS (
    SELECT DISTINCT usename AS role FROM pg_stat_activity
    WHERE datname = current_database() AND application_name = 'delayer presence'
), roles AS (SELECT role FROM live UNION SELECT current_user WHERE NOT EXISTS (SELECT FROM live))
SELECT role, "right", "on", EXISTS (SELECT FROM live) AS live
FROM roles CROSS JOIN unnest($1::text[], $2::text[]) AS needed("right", "on")
WHERE NOT CASE
    WHEN "right" = 'OWNER'
        THEN pg_has_role(role, (SELECT relowner FROM pg_class WHERE oid = to_regclass("on")), 'USAGE')
    WHEN "on" LIKE 'SCHEMA %' THEN has_schema_privilege(role, current_schema(), "right")
    WHEN "on" LIKE 'SEQUENCE %' THEN has_sequence_privilege(role, split_part("on", ' ', 2), "right")
    ELSE has_table_privilege(role, "on", "right")
END
"""
_OF_READERS: Final = ("SELECT", "USAGE")


class MissingRight(NamedTuple):
    """A right that ``role`` lacks. ``live``: whether it is a running daemon's."""

    role: str
    right: str
    on: str
    live: bool

    @property
    def advice(self) -> str:
        """The statement that gives it."""
        if self.right == "OWNER":
            return f"ALTER TABLE {self.on} OWNER TO {self.role}"
        return f"GRANT {self.right} ON {self.on} TO {self.role}"


async def missing_rights(url: str, *, history: bool) -> list[MissingRight]:
    """The rights that the live daemons' roles lack; without a daemon, those of the role of ``url``, unless it may only
    read, as an operator's. Raises StoreLost, BadStoreUrl."""
    wanted = {**RIGHTS, **(OF_HISTORY if history else {})}
    needed = [(right, on) for on, rights in wanted.items() for right in rights.split(", ")]
    async with opened(url, "delayer check", "look at the rights") as connection:
        rows = await connection.fetch(_MISSING, *map(list, zip(*needed, strict=True)))
    found = [MissingRight(*row) for row in rows]
    writing = [one for one in needed if one[0] not in _OF_READERS]
    reads_only = len([one for one in found if one.right not in _OF_READERS]) == len(writing)
    return [] if reads_only and not found[0].live else found
