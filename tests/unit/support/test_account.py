"""The account at the end of soaks and fault tests: it must find every broken promise."""

from __future__ import annotations

import struct

import pytest

from delayer.amqp.properties import Properties
from delayer.format.release import released_properties
from tests.support.account import AFTERMATH_MS, Account
from tests.support.letters import Form, Gained, Letters, long, table_of, text
from tests.support.verdict import Arrival, Verdict, Window

NOW_MS = 1_700_000_000_000
DELAY_MS = 1_000
DUE_MS = NOW_MS + DELAY_MS
UUID = b"0123456789abcdef0123456789abcdef"


def arrival(id: bytes = b"17", *, at_ms: float = DUE_MS + 5, due_ms: int = DUE_MS) -> Arrival:
    return Arrival(at_ms, id, due_ms, redelivered=False)


def verdict_of(*arrivals: Arrival, form: Form = Form.INT64, windows: list[Window] | None = None) -> Verdict:
    """The verdict on one owed message with these arrivals."""
    account = Account()
    account.windows = windows
    account.owe(form, DUE_MS, DELAY_MS)
    for one in arrivals:
        account.take(0, one)
    return account.verdict({})


@pytest.mark.parametrize("number", range(64))
def test_a_letter_is_recognized_after_our_edits(number: int) -> None:
    letters = Letters(3)
    letter = letters.letter(number, letters.form(number, None), DUE_MS, DELAY_MS)
    for id in (b"1", b"9" * 18, UUID):
        properties = released_properties(Properties.parse(letter.properties), id, DUE_MS, 131_052)
        assert letter.gained(letter.routing_key, properties, letter.body) == Gained(id, DUE_MS)


def _flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes((content[at] ^ 1,)) + content[at + 1 :]


def test_one_arrival_in_time_keeps_every_promise() -> None:
    verdict_of(arrival()).assert_kept()
    verdict_of(arrival(at_ms=DUE_MS + 9, due_ms=DUE_MS + 1)).assert_kept()


@pytest.mark.parametrize(
    ("came", "form", "told"),
    [
        ([], Form.INT64, "1 of 1 lost"),
        ([arrival(at_ms=DUE_MS - 1)], Form.INT64, "1 early"),
        ([arrival(due_ms=DUE_MS + 6)], Form.INT64, "1 early"),
        ([arrival(due_ms=DUE_MS - 1)], Form.INT64, "1 early"),
        ([arrival(at_ms=DUE_MS + 9, due_ms=DUE_MS + 1)], Form.EPOCH, "1 early"),  # the due instant was moved
        ([arrival(), arrival(due_ms=DUE_MS + 3, at_ms=DUE_MS + 9)], Form.INT64, "one id and two due instants"),
    ],
)
def test_broken_promises_are_found(came: list[Arrival], form: Form, told: str) -> None:
    with pytest.raises(AssertionError, match=told):
        verdict_of(*came, form=form).assert_kept(repeats=True)


@pytest.mark.parametrize(
    ("came", "told"),
    [([arrival(), arrival()], "more than once"), ([arrival()._replace(resorted=True)], "1 changed: sorted headers")],
)
def test_repeats_and_sorted_headers_need_a_fault(came: list[Arrival], told: str) -> None:
    verdict_of(*came).assert_kept(repeats=True)
    with pytest.raises(AssertionError, match=told):
        verdict_of(*came).assert_kept()


@pytest.mark.parametrize("ids", [(b"17", b"17"), (UUID, UUID), (b"17", b"18"), (UUID, b"18")])
def test_every_id_is_kept(ids: tuple[bytes, bytes]) -> None:
    account = Account()
    account.owe(Form.INT32, DUE_MS, DELAY_MS)
    for one in ids:
        account.take(0, arrival(one))
    assert [one.id for one in account.arrivals_of(0)] == [*ids]
    assert account.rows_back == len({one for one in ids if one != UUID})


def test_a_changed_message_is_not_missing() -> None:
    account = Account()
    account.owe(Form.INT32, DUE_MS, DELAY_MS)
    account.take_changed(0, DUE_MS + 5, "sent this, received that")
    verdict = account.verdict({})
    assert (verdict.missing, len(verdict.changed)) == ([], 1)
    with pytest.raises(AssertionError, match="sent this, received that"):
        verdict.assert_kept(repeats=True)


@pytest.mark.parametrize(
    ("window", "excused"),
    [
        (Window(NOW_MS - 50, NOW_MS - 1), False), (Window(NOW_MS - 50, NOW_MS), True),
        (Window(DUE_MS + 5, DUE_MS + 50), True), (Window(DUE_MS + 6, DUE_MS + 50), False),
    ],
)  # fmt: skip
def test_a_fault_excuses_messages_in_flight(window: Window, excused: bool) -> None:
    verdict = verdict_of(arrival(), arrival(), windows=[window])
    assert (verdict.unexcused == []) is excused


@pytest.mark.parametrize(
    ("copies", "form", "excused"),
    [
        # Read 20 s after its publish: an earlier fault cannot make the daemon publish one row twice.
        ((b"17", b"17"), Form.INT64, False),
        ((b"17", b"18"), Form.INT64, True),  # two reads, perhaps the first at once
        ((b"17", b"17"), Form.EPOCH, True),  # an instant does not reveal the time of the read
    ],
)
def test_a_fault_before_a_message_was_read_does_not_excuse_copies_of_its_row(
    copies: tuple[bytes, bytes], form: Form, excused: bool
) -> None:
    late_ms = 20_000 if form is Form.INT64 else 0
    came = [arrival(id, at_ms=DUE_MS + 20_005, due_ms=DUE_MS + late_ms) for id in copies]
    verdict = verdict_of(*came, form=form, windows=[Window(NOW_MS, NOW_MS + 20_000 - AFTERMATH_MS - 1)])
    assert (verdict.unexcused == []) is excused
    assert not verdict_of(*came, form=form, windows=[Window(NOW_MS, NOW_MS + 20_000 - AFTERMATH_MS)]).unexcused


@pytest.mark.parametrize(("copies", "excused"), [((b"17", b"18"), True), ((b"17", b"17"), False)])
def test_a_ledger_that_published_twice_excuses_two_messages_but_not_copies(
    copies: tuple[bytes, bytes], excused: bool
) -> None:
    account = Account()
    account.windows = []
    account.owe(Form.INT64, DUE_MS, DELAY_MS)
    account.published_twice.add(0)
    for id in copies:
        account.take(0, arrival(id))
    assert (account.verdict({}).unexcused == []) is excused


def test_a_letter_with_sorted_headers_is_marked() -> None:
    letters = Letters(3)
    all_of_them = [letters.letter(number, letters.form(number, None), DUE_MS, DELAY_MS) for number in range(32)]
    found = set()
    for letter in all_of_them:
        table = table_of([*sorted(letter.kept), (b"x-delayer-id", text(b"17")), (b"x-delayer-due", long(DUE_MS))])
        came = letter.head + struct.pack(">I", len(table)) + table + letter.tail
        resorted = sorted(letter.kept) != letter.kept
        assert letter.gained(letter.routing_key, came, letter.body) == Gained(b"17", DUE_MS, resorted)
        found.add(resorted)
    assert found == {True, False}


@pytest.mark.parametrize("sorts", [False, True])
@pytest.mark.parametrize("number", range(32))
def test_every_changed_byte_is_found(number: int, sorts: bool) -> None:
    """The values of the headers that delayer adds are left out."""
    letters = Letters(3)
    letter = letters.letter(number, letters.form(number, None), DUE_MS, DELAY_MS)
    gained = [(b"x-delayer-id", text(b"17")), (b"x-delayer-due", long(DUE_MS))]
    entries = [*letter.kept, *gained]
    table = table_of(sorted(entries) if sorts else entries)
    came = letter.head + struct.pack(">I", len(table)) + table + letter.tail
    assert letter.gained(letter.routing_key, came, letter.body, sorts=sorts) == Gained(b"17", DUE_MS)
    assert letter.gained(b"ledger.other", came, letter.body, sorts=sorts) is None
    ours = came.index(b"\x0dx-delayer-due" if sorts else b"\x0cx-delayer-id")
    for at in [*range(ours), *range(ours + len(table_of(gained)), len(came))]:
        assert letter.gained(letter.routing_key, _flipped(came, at), letter.body, sorts=sorts) is None, at
    for at in range(min(len(letter.body), 100)):
        assert letter.gained(letter.routing_key, came, _flipped(letter.body, at), sorts=sorts) is None
