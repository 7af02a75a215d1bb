"""The crash table of the SQL inbox: a process, a server or a connection dies while a message leaves the inbox."""

from __future__ import annotations

import pytest

from tests.faults.scenes import Scenes, check
from tests.faults.tables import INBOX, cases


@pytest.mark.deadline(180)
@pytest.mark.parametrize(("name", "death"), cases(INBOX))
def test_messages_sent_by_sql(inbox_scenes: Scenes, name: str, death: str) -> None:
    row, outcome = inbox_scenes.outcome(death, name)
    check(row, outcome, row.copies[death])
