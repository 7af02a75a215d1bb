"""The properties over which the broker closes a channel: delayer judges them exactly as the broker does."""

from __future__ import annotations

import pytest

from delayer.amqp.properties import Properties
from delayer.amqp.values import CONFIRMED, Outgoing
from delayer.core.message import DIRECT_REPLY, LONGEST_EXPIRATION_MS
from delayer.format.release import why_unpublishable
from tests.conformance.broker_world import Place, codes
from tests.support.raw import VOID, Props, array, number, table, text

EXPIRATIONS = [
    *(b"0", b"5", b"+5", b"-0", b"-1", b"0005", b"0" * 250 + b"70000", b"%d" % LONGEST_EXPIRATION_MS),
    *(b"%d" % (LONGEST_EXPIRATION_MS + 1), b"9" * 255, b"", b"+", b"soon", b"5 ", b" 5", b"5\n", b"5s", b"5.0", b"1e3"),
    *("٥".encode(), b"\xff", b"0x5", b"+-5", b"1_000"),
]
COPIES = [array(), array(text("nobody"), number("I", 5)), text("nobody"), table((b"k", text("x"))), VOID]
CASES = [
    *(Props(expiration=one) for one in EXPIRATIONS),
    *(Props(headers=((name, one),)) for name in (b"CC", b"BCC") for one in COPIES),
    *(Props(headers=((b"CC", one), (b"CC", other))) for one, other in ((COPIES[0], VOID), (VOID, COPIES[0]))),
    *(Props(reply_to=one) for one in (DIRECT_REPLY, DIRECT_REPLY + b".", DIRECT_REPLY.upper(), b"q", b"")),
]


@pytest.mark.deadline(60)
async def test_the_broker_closes_the_channel_exactly_over_these(place: Place) -> None:
    async with place.world("q") as world:
        for props in CASES:
            raw = props.encode()
            why = why_unpublishable(Properties.parse(raw))
            outcome = codes(await world.publisher.publish([Outgoing(b"", b"q", raw, b"", b"")]))
            assert outcome == [406 if why else CONFIRMED], (props, why)
