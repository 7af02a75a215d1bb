"""The mutants, by name: one line of the program, what it is broken into, and the tests that must notice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Mutant(NamedTuple):
    """``text`` stands ``times`` times in ``file``, and each is replaced. ``tests``: files or node ids, of which one
    test at least must fail."""

    name: str
    file: str
    text: str
    replacement: str
    tests: Sequence[str]
    times: int = 1


MUTANTS: Sequence[Mutant] = (
    Mutant(
        "drop-empty-looks-once",
        "delayer/store/partitions.py",
        """            if await connection.fetchval(f"SELECT EXISTS (SELECT FROM {name})"):
                return False
            await connection.execute(f"DROP""",
        """            await connection.execute(f"DROP""",
        ["tests/integration/test_store_mutants.py"],
    ),
    Mutant(
        "park-fence-without-share",
        "delayer/store/sql/count_parked.sql",
        " FOR SHARE)",
        ")",
        ["tests/integration/test_store_mutants.py"],
    ),
    Mutant(
        "commit-does-not-wait",
        "delayer/store/session.py",
        '        "synchronous_commit": "on",',
        '        "synchronous_commit": "off",',
        ["tests/integration/test_store_mutants.py"],
    ),
    Mutant(
        "claim-50-ms-early",
        "delayer/store/sql/claim.sql",
        "due_at <= statement_timestamp()",
        "due_at <= statement_timestamp() + interval '50 ms'",
        ["tests/conformance/test_store.py::TestPostgresStore::test_a_claim_leaves_what_is_due_a_moment_later"],
        times=2,
    ),
)
