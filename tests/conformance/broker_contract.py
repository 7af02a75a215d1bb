"""What every publisher and every consumer must do, as a suite: subclass :class:`BrokerContract`, and say how they are
made."""

from __future__ import annotations

from tests.conformance.consumer_contract import ConsumerContract
from tests.conformance.publisher_contract import PublisherContract


class BrokerContract(PublisherContract, ConsumerContract):
    """Both ports, in one world."""
