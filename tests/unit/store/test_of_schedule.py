"""The name of a schedule in what SQL returns of a message's headers."""

from __future__ import annotations

import pytest

from delayer.store.rows.of_schedule import HEADER, name_in


@pytest.mark.parametrize(
    ("found", "name"),
    [
        (None, None),
        (HEADER, None),  # the header is the last one, and cut
        (HEADER + b"\0", None),
        (HEADER + b"\x04tick", "tick"),
        (HEADER + b"\x04tick\x05after", "tick"),
        (HEADER + b"\x03a b", None),  # no schedule can have this name
        (HEADER + b"\x02\xff\xfe", None),
    ],
)
def test_only_the_name_of_a_schedule_is_one(found: bytes | None, name: str | None) -> None:
    assert name_in(found) == name
