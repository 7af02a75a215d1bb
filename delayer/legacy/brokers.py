"""A source's broker: where it is, and asking it; whatever it does not answer is the source's loss."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Final, TypeVar

from delayer.broker.admin import Admin
from delayer.broker.errors import BrokerRefused
from delayer.core.errors import BrokerLost
from delayer.legacy.ports import BadSource, SourceLost
from delayer.wire.address import Address

T = TypeVar("T")
HEARTBEAT: Final = 20.0
NAME: Final = "delayer import"


async def asked(question: Awaitable[T]) -> T:
    """The answer, or SourceLost."""
    try:
        return await question
    except (BrokerLost, BrokerRefused) as error:
        raise SourceLost(str(error)) from error


async def admin_of(url: str) -> Admin:
    """To be closed. Raises BadSource, SourceLost."""
    address_of(url)
    return await asked(Admin.connect(url, name=NAME))


def address_of(url: str) -> Address:
    """Where a source's broker is. Raises BadSource, never showing the URL."""
    try:
        return Address.parse(url)
    except ValueError as error:
        raise BadSource(f"the source's {error}") from None
