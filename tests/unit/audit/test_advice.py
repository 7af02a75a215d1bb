"""The next step after an error of Postgres."""

from __future__ import annotations

import pytest

from delayer.audit.connection import advice_for


@pytest.mark.parametrize(
    "text", ['ERROR:  invalid snapshot identifier: "a-1"', 'ERROR:  snapshot "00000072-0000001B-1" does not exist']
)
def test_a_lost_snapshot_is_known_by_the_words_of_each_version(text: str) -> None:
    assert "run the job again" in advice_for(text)
    assert not advice_for('ERROR:  relation "snapshot" is missing')
