"""Acks, nacks and returns find their message: by number, and by token."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayer.amqp.channel import Batch, Confirms
from delayer.amqp.errors import ProtocolError
from delayer.amqp.framing import ReturnedMessage
from delayer.amqp.properties import encode_headers, entry, int64, long_string
from delayer.amqp.values import CONFIRMED, Answer, Nacked, Returned
from tests.unit.amqp.recorded import TOKEN_HEADER

NO_ROUTE = Returned(312, "NO_ROUTE")
C, N, R = CONFIRMED, Nacked(), NO_ROUTE


def back(token: bytes) -> ReturnedMessage:
    return ReturnedMessage(312, "NO_ROUTE", encode_headers(entry(TOKEN_HEADER, long_string(token))), b"")


def batch_of(count: int, prefix: str = "t") -> Batch:
    tokens = [f"{prefix}{at}".encode() for at in range(count)]
    return Batch(tokens, asyncio.get_running_loop().create_future())


async def written(*counts: int) -> tuple[Confirms, list[Batch]]:
    confirms = Confirms(TOKEN_HEADER)
    batches = [batch_of(count, prefix) for count, prefix in zip(counts, "abcdef", strict=False)]
    for batch, count in zip(batches, counts, strict=True):
        confirms.written(batch, 0, count)
    return confirms, batches


# The broker's answers, as (number, multiple, positive) or a returned token, and the answers of three messages.
@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ([(3, True, True)], [C, C, C]),
        ([(0, True, True)], [C, C, C]),
        ([(2, False, True), (3, True, False)], [N, C, N]),
        (["a1", (3, True, True)], [C, R, C]),
        (["a0", (1, False, True), "a2", (3, True, True)], [R, C, R]),
        (["a0", "a1", "a2", (3, True, True)], [R, R, R]),
        (["a1", (2, False, False), (3, True, True)], [C, R, C]),
        ([(2, True, True), (2, True, True), (3, False, True)], [C, C, C]),  # repeats an ack
    ],
)
async def test_one_batch(said: list[tuple[int, bool, bool] | str], expected: list[Answer]) -> None:
    confirms, (batch,) = await written(3)
    for one in said:
        assert not batch.answers.done()
        if isinstance(one, str):
            confirms.note_returned(back(one.encode()))
        else:
            number, multiple, positive = one
            confirms.settle(number, multiple=multiple, positive=positive)
    assert batch.answers.result() == expected
    assert confirms.in_flight == 0


@pytest.mark.parametrize(
    ("number", "multiple", "why"), [(0, False, "publish 0"), (4, False, "publish 4"), (4, True, "publish 4")]
)
async def test_a_confirm_without_a_publish_is_an_error(number: int, multiple: bool, why: str) -> None:
    confirms, _ = await written(3)
    with pytest.raises(ProtocolError, match=why):
        confirms.settle(number, multiple=multiple, positive=True)


async def test_a_second_confirm_is_an_error() -> None:
    confirms, _ = await written(3)
    confirms.settle(2, multiple=False, positive=True)
    with pytest.raises(ProtocolError, match="second confirm of publish 2"):
        confirms.settle(2, multiple=False, positive=True)
    confirms.settle(3, multiple=True, positive=True)
    with pytest.raises(ProtocolError, match="second confirm of publish 3"):
        confirms.settle(3, multiple=False, positive=True)


@pytest.mark.parametrize(
    ("properties", "why"),
    [
        (b"\0\0", "no x-token"),
        (encode_headers(entry(TOKEN_HEADER, long_string(b"stranger"))), "0 publishes"),
        (encode_headers(entry(TOKEN_HEADER, int64(1))), "0 publishes"),
        (b"\x20\0\0\0\0\x02\1a", "cannot be read"),
        (b"\x80", "cannot be read"),
    ],
)
async def test_a_return_of_an_unknown_message_is_an_error(properties: bytes, why: str) -> None:
    confirms, _ = await written(3)
    with pytest.raises(ProtocolError, match=why):
        confirms.note_returned(ReturnedMessage(312, "NO_ROUTE", properties, b""))


async def test_the_same_token_in_flight_twice() -> None:
    with pytest.raises(ValueError, match="unique"):
        Batch([b"a", b"b", b"a"], asyncio.get_running_loop().create_future())
    confirms = Confirms(TOKEN_HEADER)
    confirms.written(batch_of(1), 0, 1)
    confirms.written(batch_of(1), 0, 1)
    with pytest.raises(ProtocolError, match="2 publishes"):
        confirms.note_returned(back(b"t0"))


async def test_answers_known_at_the_timeout() -> None:
    """A return takes effect after its confirm. The outcome of an unwritten message is unknown."""
    confirms = Confirms(TOKEN_HEADER)
    batch = batch_of(6)
    confirms.written(batch, 0, 3)
    confirms.written(Batch([b"between"], asyncio.get_running_loop().create_future()), 0, 1)
    confirms.written(batch, 3, 2)
    for token in (b"t0", b"t1"):
        confirms.note_returned(back(token))
    assert batch.so_far() == [None] * 6
    confirms.settle(1, multiple=False, positive=True)
    confirms.settle(5, multiple=False, positive=False)
    confirms.settle(6, multiple=False, positive=True)
    found = batch.so_far()
    assert found[0] == NO_ROUTE
    assert found[1:] == [None, None, N, C, None]


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=5),
    st.lists(st.tuples(st.integers(0, 30), st.booleans(), st.booleans()), max_size=40),
)
def test_confirms_in_any_order_match_a_table(counts: list[int], said: list[tuple[int, bool, bool]]) -> None:
    """Every order of confirms gives the same answers as a table by number."""
    total = sum(counts)
    table: dict[int, Answer] = {}

    async def run() -> None:
        confirms, batches = await written(*counts)
        for wish, multiple, positive in [*said, (total - 1, True, True)]:
            number = wish % total + 1  # the last one settles all
            if not multiple and number in table:
                continue
            for one in range(1 if multiple else number, number + 1):
                table.setdefault(one, C if positive else N)
            confirms.settle(number, multiple=multiple, positive=positive)
            assert confirms.in_flight == total - len(table)
            known = [answer for batch in batches for answer in batch.so_far()]
            assert known == [table.get(one) for one in range(1, total + 1)]
        first = 1
        for batch, count in zip(batches, counts, strict=True):
            assert batch.answers.result() == [table[one] for one in range(first, first + count)]
            first += count

    asyncio.run(run())
