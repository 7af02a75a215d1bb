"""The settler: nothing is acknowledged before it is accepted, and everything accepted is, once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from delayer.intake.consume import AckTracker
from tests.support.fakes import Acks, delivery


def settler_with(*tags: int) -> tuple[AckTracker, Acks]:
    acks = Acks()
    settler = AckTracker(acks)
    settler.read([delivery(tag) for tag in tags])
    return settler, acks


def test_a_batch_is_one_acknowledgement() -> None:
    settler, acks = settler_with(*range(1, 2001))
    settler.accept(range(1, 2001))
    assert acks.acked == [(2000, True)]
    assert settler.outstanding == 0


def test_an_acknowledgement_waits_for_earlier_deliveries() -> None:
    settler, acks = settler_with(1, 2, 3, 4)
    settler.accept([2, 3])
    assert acks.acked == []
    settler.accept([1])
    assert acks.acked == [(3, True)]
    assert settler.outstanding == 1


def test_flush_acknowledges_one_by_one_and_leaves_the_rest() -> None:
    settler, acks = settler_with(1, 2, 3, 4)
    settler.accept([4, 2])
    settler.flush()
    assert acks.acked == [(2, False), (4, False)]
    assert settler.outstanding == 2
    settler.flush()
    assert len(acks.acked) == 2


def test_accepting_nothing() -> None:
    settler, acks = settler_with(1)
    settler.accept([])
    settler.flush()
    assert acks.acked == []


def gone(acks: Acks, read: list[int]) -> list[int]:
    """What the broker has let go of: `multiple` settles everything unsettled up to the tag."""
    left, found = list(read), []
    for tag, multiple in acks.acked:
        taken = [one for one in left if one <= tag] if multiple else [tag]
        assert set(taken) <= set(left), "acknowledged twice"
        found += taken
        left = [one for one in left if one not in taken]
    return found


@given(st.data())
def test_any_order_of_acceptance(data: st.DataObject) -> None:
    tags = sorted(data.draw(st.sets(st.integers(1, 60), min_size=1)))
    accepted = data.draw(st.permutations(tags))[: data.draw(st.integers(0, len(tags)))]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(accepted)), max_size=5)))
    acks = Acks()
    settler = AckTracker(acks)
    settler.read([delivery(tag) for tag in tags])
    done: set[int] = set()
    for start, stop in zip([0, *cuts], [*cuts, len(accepted)], strict=True):
        settler.accept(accepted[start:stop])
        done |= set(accepted[start:stop])
        assert set(gone(acks, tags)) <= done
        assert settler.outstanding == len(tags) - len(gone(acks, tags))
    settler.flush()
    assert sorted(gone(acks, tags)) == sorted(done)
    assert settler.outstanding == len(tags) - len(done)
