"""The simulated broker answers as RabbitMQ does: both play the same scenes, and their transcripts must be equal.

A transcript has what a client can see: answers and their texts, deliveries in their order with every byte of their
properties, confirms, returns, counts and closes. Times and generated names are left out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.conformance import broker_dead_letters, broker_scenes  # noqa: F401 - they fill SCENES
from tests.conformance.broker_scene import SCENES, Scene
from tests.simulation.broker.threaded import ThreadedBroker
from tests.support.servers import RabbitMQ

Play = Callable[[Scene], Awaitable[None]]


async def transcript(broker: RabbitMQ, play: Play) -> list[Any]:
    name = broker.add_vhost()
    mine = "^mine"
    broker.add_user("limited", "secret", vhost=name, configure=mine, write=mine, read=mine)
    async with Scene.open(broker.url(name)) as scene:
        scene.limited_url = broker.url(name, user="limited:secret")
        await play(scene)
    broker.drop_vhost(name)
    return scene.transcript


@pytest.mark.parametrize("play", SCENES, ids=lambda play: play.__name__)
async def test_both_brokers_play_a_scene_alike(play: Play, rabbitmq: RabbitMQ, simulated: ThreadedBroker) -> None:
    if rabbitmq.version[:2] != simulated.version[:2]:
        pytest.skip(f"the simulated broker is RabbitMQ {'.'.join(map(str, simulated.version))}")
    assert await transcript(simulated, play) == await transcript(rabbitmq, play)
