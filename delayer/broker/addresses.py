"""The addresses of one broker: several URLs, and several addresses behind one host name. Any of them will do."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from delayer.amqp.address import Address
from delayer.amqp.errors import AccessRefused
from delayer.broker.errors import BrokerRefused, BrokerUnreachable
from delayer.core.errors import BrokerLost

T = TypeVar("T")

CONNECT_SECONDS: Final = 10.0
"""How long one address may take, so that a node that hangs does not keep a client from the next one."""


def addresses_of(urls: str) -> list[Address]:
    """The addresses of these URLs, separated by commas. It reads the files that they name.

    Raises BrokerUnreachable: URLs were checked before, so a file is missing at this moment, or half written.
    """
    try:
        return Address.parse_all(urls)
    except ValueError as error:
        advice = "see that ca_file, cert_file and key_file of [broker] are complete, and belong together"
        raise BrokerUnreachable(str(error), advice=advice) from error


async def of_first(
    addresses: Sequence[Address], attempt: Callable[[Address], Awaitable[T]], avoided: Address | None = None
) -> T:
    """The result of the first ``attempt`` that succeeds. Each address gets one, in turn from a random one on;
    ``avoided``, which was lost last, comes last.

    Raises BrokerRefused or BrokerLost: a refusal if there was any, else the reasons of all.
    """
    losses: list[BrokerLost | BrokerRefused] = []
    places: list[Address] = []
    for found in await asyncio.gather(*map(_places, addresses), return_exceptions=True):
        if isinstance(found, BrokerLost):
            losses.append(found)
        elif isinstance(found, BaseException):
            raise found
        else:
            places += found
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
    losses.sort(key=str)  # The same texts in every round: the log tells a reason once.
    for loss in losses:
        if isinstance(loss, AccessRefused | BrokerRefused) or loss.advice:
            raise loss
    raise BrokerUnreachable("; ".join(dict.fromkeys(map(str, losses)))) from losses[0]


async def _places(address: Address) -> list[Address]:
    """One for each address of its host; itself if there is only one. Raises BrokerUnreachable."""
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            places = await look_up(address.host, address.port)
    except TimeoutError as late:
        raise BrokerUnreachable(f"no connection to {address}: the name server is silent") from late
    except OSError as error:
        raise BrokerUnreachable(f"no connection to {address}: {error}") from error
    return [address] if len(places) == 1 else [replace(address, at=at) for at in places]


async def look_up(host: str, port: int) -> list[str]:
    """The addresses of a host. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))
