"""Several addresses of one broker: each is tried in turn, from a random one on."""

from __future__ import annotations

import random
import socket
from typing import Any

import pytest

from delayer.amqp.address import Address
from delayer.amqp.errors import AccessRefused, BrokerLost, ConnectionLost
from delayer.broker import addresses
from delayer.broker.addresses import addresses_of, first_success, losses_of
from delayer.broker.errors import BrokerRefused, BrokerUnreachable

NAMES = {"cluster": ["10.0.0.1", "10.0.0.2"], "single": ["10.0.0.3"]}


@pytest.fixture(autouse=True)
def _names(monkeypatch: pytest.MonkeyPatch) -> None:
    async def look_up(host: str, _port: int) -> list[str]:
        if host == "nowhere":
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return NAMES.get(host, [host])

    monkeypatch.setattr(addresses, "look_up", look_up)


class Attempts:
    """Records the addresses tried. Those in ``alive`` accept a connection; the rest fail as in ``failures``."""

    def __init__(self, *alive: str, **failures: Exception) -> None:
        self.alive = alive
        self.failures = failures
        self.tried: list[str] = []

    async def __call__(self, address: Address) -> str:
        place = address.at or address.host
        self.tried.append(place)
        if place in self.alive:
            return place
        raise self.failures.get(place, ConnectionLost(0, f"no connection to {place}"))


async def test_every_address_is_tried_once_a_round() -> None:
    every = addresses_of("amqp://a/,amqp://b/,amqp://cluster/,amqp://single/")
    places = {"a", "b", "10.0.0.1", "10.0.0.2", "single"}
    firsts = set()
    for seed in range(40):
        random.seed(seed)
        attempts = Attempts()
        with pytest.raises(BrokerUnreachable) as caught:
            await first_success(every, attempts)
        assert sorted(attempts.tried) == sorted(places)
        assert str(caught.value) == "; ".join(f"no connection to {place}" for place in sorted(places))
        firsts.add(attempts.tried[0])
    assert firsts == places


async def test_the_first_address_that_answers_is_used() -> None:
    for seed in range(20):
        random.seed(seed)
        attempts = Attempts("10.0.0.2")
        assert await first_success(addresses_of("amqp://dead/,amqp://cluster/,amqp://nowhere/"), attempts) == "10.0.0.2"
        assert len(set(attempts.tried)) == len(attempts.tried) <= 3


async def test_the_address_lost_last_is_tried_last() -> None:
    _, lost = addresses_of("amqp://a/,amqp://b/")
    for seed in range(20):
        random.seed(seed)
        attempts = Attempts("c")
        await first_success(addresses_of("amqp://b/,amqp://c/"), attempts, lost)
        assert attempts.tried == ["c"]


async def test_a_refusal_is_reported_before_an_outage() -> None:
    refusals: list[Exception] = [AccessRefused(403, "no"), BrokerRefused("no"), ConnectionLost(0, "no")]
    refusals[2].advice = "do this"  # type: ignore[attr-defined]
    for refusal in refusals:
        with pytest.raises(type(refusal), match="no"):
            await first_success(addresses_of("amqp://a/,amqp://b/,amqp://c/"), Attempts(b=refusal))


async def test_every_failure_is_reported_even_if_others_succeed() -> None:
    refused = AccessRefused(403, "no")
    attempts = Attempts("10.0.0.1", "single", **{"10.0.0.2": refused})
    losses = await losses_of(addresses_of("amqp://nowhere/,amqp://cluster/,amqp://dead/,amqp://10.0.0.3/"), attempts)
    assert {str(one) for one in losses} >= {"403 no", "no connection to dead", "no connection to 10.0.0.3"}
    assert any("no such name" in str(one) for one in losses)
    attempts = Attempts()
    assert not await losses_of(addresses_of("amqp://single/"), attempts)
    assert not attempts.tried


async def test_a_single_failure_is_reported_unchanged() -> None:
    with pytest.raises(ConnectionLost):
        await first_success(addresses_of("amqp://a/"), Attempts())
    with pytest.raises(BrokerUnreachable, match="no such name"):
        await first_success(addresses_of("amqp://nowhere/"), Attempts("nowhere"))


def test_a_file_that_is_missing_now_is_an_outage(tmp_path: Any) -> None:
    with pytest.raises(BrokerLost, match="cafile") as caught:
        addresses_of(f"amqps://a/?cafile={tmp_path}/gone.pem")
    assert caught.value.advice


async def test_localhost_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert "127.0.0.1" in await addresses.look_up("localhost", 5672)
    assert await addresses.look_up("127.0.0.2", 5672) == ["127.0.0.2"]
