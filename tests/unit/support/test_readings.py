"""Reads counted between a broker and its consumers, and the conclusions of the account."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from pamqp import body, commands, frame, header

from tests.support.account import Account
from tests.support.letters import NUMBER, Form
from tests.support.readings import Readings
from tests.support.verdict import Arrival, Verdict

DUE_MS = 1_700_000_001_000
DELAY_MS = 1_000
INTO, CASCADE = "delayer.in", "delayer.delay-delivery"
OURS, CARRIED, DOOMED = "ledger.3", "0.1.delays.due", "doomed.3"
FIRST, SECOND = b"0" * 32, b"1" * 32


def delivery(
    number: int, exchange: str = INTO, key: str = OURS, *, again: bool = False, pieces: Iterable[bytes] = (b"more",)
) -> bytes:
    """The broker's frames of a delivery, with one body frame for each piece."""
    first, *rest = [*pieces] or [b""]
    content = [NUMBER.pack(number) + first, *rest]
    frames = [
        commands.Basic.Deliver("ctag", 7, again, exchange, key),
        header.ContentHeader(0, sum(map(len, content)), commands.Basic.Properties(message_id="one")),
        *(body.ContentBody(piece) for piece in content),
    ]
    return b"".join(frame.marshal(one, 3) for one in frames)


def heard(*said: bytes) -> Readings:
    """The reads of one connection with these bytes."""
    readings = Readings(INTO.encode())
    listener = readings.listener()
    for piece in said:
        listener(piece)
    return readings


def test_a_connection_is_parsed_in_any_pieces() -> None:
    acknowledgement = frame.marshal(commands.Basic.Ack(9, True), 1)
    said = acknowledgement + delivery(5, pieces=[b"x" * 100, b"y" * 50, b""]) + frame.marshal(
        commands.Channel.Close(320, "over", 0, 0), 3
    ) + delivery(6, again=True)  # fmt: skip
    for at in range(len(said)):
        readings = heard(said[:at], said[at:])
        assert (readings.read(5), readings.again(5), readings.read(6), readings.again(6)) == (1, False, 1, True)
    readings = heard(*(said[at : at + 1] for at in range(len(said))))
    assert (readings.read(5), readings.read(6)) == (1, 1)


def test_foreign_messages_do_not_count() -> None:
    deliveries = [delivery(3, key=DOOMED), delivery(1 << 60), delivery(3, key=DOOMED, again=True), delivery(3, key="x")]
    readings = heard(*deliveries)
    assert (readings.read(3), readings.again(3), readings.due(3)) == (0, False, 0)
    assert (readings.doomed(3), readings.doomed(2)) == (2, 0)


def test_a_dead_letter_may_be_sorted() -> None:
    readings = heard(delivery(3), delivery(3, "somebodys.dlx"))
    assert (readings.read(3), readings.again(3), readings.due(3)) == (1, True, 1)


def verdict_of(readings: Readings, *ids: bytes, form: Form = Form.INT64, **arrival: bool) -> Verdict:
    """The verdict after message 0 came under these ids."""
    account = Account()
    account.readings = readings
    account.owe(form, DUE_MS, DELAY_MS)
    for id in ids:
        account.take(0, Arrival(DUE_MS + 5, id, DUE_MS, **{"redelivered": False} | arrival))
    return account.verdict({})


READ, AGAIN, CAME_DUE = delivery(0), delivery(0, again=True), delivery(0, CASCADE, CARRIED)


@pytest.mark.parametrize(
    ("said", "ids", "form", "accounted"),
    [
        ([READ], [b"17", b"17"], Form.INT64, True),  # reads do not show a second publish of a row
        ([READ], [b"17", b"18"], Form.INT64, False),
        ([READ, AGAIN], [b"17", b"18"], Form.INT64, True),
        ([READ, AGAIN], [b"17", b"18", b"19"], Form.INT64, False),
        ([READ, CAME_DUE], [FIRST, b"17"], Form.INT64, True),  # held at its due instant
        ([READ, CAME_DUE, CAME_DUE], [FIRST, SECOND], Form.INT64, False),  # a new id at the end of the cascade
        ([READ, CAME_DUE, CAME_DUE], [FIRST, FIRST], Form.INT64, True),
        ([READ, CAME_DUE], [FIRST, FIRST], Form.INT64, True),  # a fault may repeat a publish: G3
        ([READ, AGAIN, CAME_DUE, CAME_DUE], [FIRST, SECOND], Form.INT64, True),
        ([READ, AGAIN, CAME_DUE], [FIRST, SECOND], Form.EPOCH, True),  # the second time it was due at once
    ],
)
def test_reads_limit_the_number_of_ids(said: list[bytes], ids: list[bytes], form: Form, accounted: bool) -> None:
    verdict = verdict_of(heard(*said), *ids, form=form)
    assert bool(verdict.unaccounted) is not accounted
    if not accounted:
        with pytest.raises(AssertionError, match="1 more than they were read: message 0"):
            verdict.assert_kept(repeats=True)


def test_only_a_redelivered_message_may_be_sorted() -> None:
    verdict_of(heard(READ, AGAIN), b"17", resorted=True).assert_kept()
    with pytest.raises(AssertionError, match="its headers came sorted, and it was never delivered again"):
        verdict_of(heard(READ), b"17", resorted=True).assert_kept(repeats=True)
