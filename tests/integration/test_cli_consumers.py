"""The command line's output on the consumers of the intake queue."""

from __future__ import annotations

import pytest

from tests.integration.cli import Run, destination, rows


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
def test_a_queue_declared_for_the_other_value_of_consumers_is_reported(delayer: Run, queue_type: str) -> None:
    kind = {"DELAYER_INTAKE__QUEUE_TYPE": queue_type}
    shared = kind | {"DELAYER_INTAKE__CONSUMERS": "shared"}
    for before, now in ((shared, kind), (kind, shared)):
        delayer("topology", "apply", **before)
        (row,) = [row for row in rows(delayer, "topology", expect=1, **now) if "queue delays:" in row["found"]]
        refused, verified = (delayer("topology", verb, expect=1, **now).stderr for verb in ("apply", "verify"))
        assert "`delayer check` says what to do about each" in refused
        for advice in (row["advice"], verified):
            assert "set the other value of [intake] consumers" in advice
        for advice in (row["advice"], refused, verified):
            assert "elete it" not in advice and "delete_queue" not in advice
        delayer("topology", "remove", "--force", **before)


async def test_check_explains_the_choice_of_consumers(delayer: Run, vhost: str) -> None:
    await destination(vhost)
    (row,) = rows(delayer, "consumers")
    assert (row["result"], row["advice"]) == ("ok", "")
    assert "keys are in order" in row["found"]
    (row,) = rows(delayer, "consumers", DELAYER_INTAKE__CONSUMERS="shared")
    assert row["result"] == "note"
    assert "with a key or a cancel are refused" in row["found"]
