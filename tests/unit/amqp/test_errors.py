"""What of a lost connection is about a message that was sent over it."""

from __future__ import annotations

import pytest

from delayer.amqp.errors import AccessRefused, ConnectionLost, ProtocolError


@pytest.mark.parametrize(
    ("loss", "objects"),
    [
        (ConnectionLost(0, "the broker hung up"), False),
        (ConnectionLost(320, "CONNECTION_FORCED - shutdown"), False),
        (ConnectionLost(501, "FRAME_ERROR"), True),
        (ConnectionLost(541, "INTERNAL_ERROR"), True),
        (
            ConnectionLost(530, "NOT_ALLOWED - number of channels opened for user 'guest' has reached the maximum"),
            False,
        ),
        (AccessRefused(530, "NOT_ALLOWED - vhost missing not found"), False),
        (ProtocolError(505, "ours"), False),
    ],
)
def test_whether_the_broker_objects(loss: ConnectionLost, objects: bool) -> None:
    assert loss.objects is objects
