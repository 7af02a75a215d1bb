"""What Postgres says of damage, as a question whose it is."""

from __future__ import annotations

import pytest

from delayer.store.segments.damaged import Named, question


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("invalid page in block 0 of relation base/16384/16402", "pg_filenode_relation(0, 16402)"),
        ('could not open file "base/16384/16402.1" (target block 131072)', "pg_filenode_relation(0, 16402)"),
        (
            "invalid page in block 7 of relation pg_tblspc/24576/PG_15_202209061/16384/16402",
            "pg_filenode_relation(24576, 16402)",
        ),
        ('index "segment_pkey" contains unexpected zero page at block 3', """to_regclass('"segment_pkey"')"""),
        ("""index "o'clock" is not a btree""", """to_regclass('"o''clock"')"""),
    ],
)
def test_whose_it_is_can_be_asked(text: str, asked: str) -> None:
    found = question(text)
    assert found is not None
    assert asked in found


@pytest.mark.parametrize("text", ["missing chunk number 0 for toast value 16500 in pg_toast_16402", "out of memory"])
def test_where_no_file_is_named_nothing_is_asked(text: str) -> None:
    assert question(text) is None


def test_an_index_can_be_made_anew() -> None:
    index = Named("segment_pkey", "segment")
    assert str(index) == "index segment_pkey of table segment"
    assert "REINDEX INDEX segment_pkey" in index.advice
    assert "REINDEX" not in Named("segment", None).advice
