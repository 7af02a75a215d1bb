"""The addresses of one broker: several URLs, and several addresses of one host name. All are equivalent."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar

from delayer import __version__
from delayer.amqp.address import Address
from delayer.amqp.connection import Connection
from delayer.amqp.errors import AccessRefused, BrokerLost
from delayer.broker.errors import BrokerRefused, BrokerUnreachable

T = TypeVar("T")
Loss = BrokerLost | BrokerRefused

CONNECT_SECONDS: Final = 10.0
"""Timeout of one address, so that a hanging node does not keep a client from the next address."""

connect = partial(Connection.open, product="delayer", version=__version__, timeout=CONNECT_SECONDS)
"""Opens a connection that the broker's operators see as delayer's. Raises BrokerLost."""


def addresses_of(urls: str) -> list[Address]:
    """Parse URLs, separated by commas, and read the files that they name.

    Raises BrokerUnreachable if a file is missing now, or half written. The URLs were checked before.
    """
    try:
        return Address.parse_all(urls)
    except ValueError as error:
        advice = "see that ca_file, cert_file and key_file of [broker] are complete, and belong together"
        raise BrokerUnreachable(str(error), advice=advice) from error


async def first_success(
    addresses: Sequence[Address], attempt: Callable[[Address], Awaitable[T]], avoided: Address | None = None
) -> T:
    """Return the result of the first successful ``attempt``. Tries each address once, beginning at a random one.
    ``avoided``, the address that was lost last, comes at the end.

    Raises BrokerRefused if a broker refused, otherwise BrokerLost with the reason of each address.
    """
    losses: list[Loss] = []
    places = [place for places in await _results(map(_places, addresses), losses) for place in places]
    first = random.randrange(len(places)) if places else 0
    places = places[first:] + places[:first]
    if avoided is not None:
        places.sort(key=lambda one: (one.host, one.port, one.at) == (avoided.host, avoided.port, avoided.at))
    for place in places:
        try:
            return await attempt(place)
        except (BrokerLost, BrokerRefused) as lost:
            losses.append(lost)
    if len(losses) == 1:
        raise losses[0]
    losses.sort(key=str)  # The same text in every round, so that the log states a reason once.
    for loss in losses:
        if isinstance(loss, AccessRefused | BrokerRefused) or loss.advice:
            raise loss
    raise BrokerUnreachable("; ".join(dict.fromkeys(map(str, losses)))) from losses[0]


async def losses_of(addresses: Sequence[Address], attempt: Callable[[Address], Awaitable[object]]) -> list[Loss]:
    """Return the error of each address for which ``attempt`` fails. Makes no attempt if there is only one address."""
    losses: list[Loss] = []
    places = [place for places in await _results(map(_places, addresses), losses) for place in places]
    if len(places) + len(losses) > 1:
        await _results(map(attempt, places), losses)
    return losses


async def _results(attempts: Iterable[Awaitable[T]], losses: list[Loss]) -> list[T]:
    """Run all attempts at once. Returns the results of those that succeed, and adds the errors of the rest to
    ``losses``."""

    async def result(attempt: Awaitable[T]) -> list[T]:
        try:
            return [await attempt]
        except (BrokerLost, BrokerRefused) as lost:
            losses.append(lost)
            return []

    return [one for found in await asyncio.gather(*map(result, attempts)) for one in found]


async def _places(address: Address) -> list[Address]:
    """Return a copy for each address of the host; only itself if the host has one address. Raises BrokerUnreachable."""
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            places = await look_up(address.host, address.port)
    except TimeoutError as late:
        raise BrokerUnreachable(f"no connection to {address}: the name server is silent") from late
    except OSError as error:
        raise BrokerUnreachable(f"no connection to {address}: {error}") from error
    return [address] if len(places) == 1 else [replace(address, at=at) for at in places]


async def look_up(host: str, port: int) -> list[str]:
    """Look up the addresses of a host. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))
