"""A store belongs to one broker and virtual host: daemons of another broker or virtual host neither take its lanes nor
park in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.acceptance.own_vhost import OwnVhost, delayed
from tests.acceptance.test_http import ANY_PORT
from tests.support.daemon import DaemonProcess, command
from tests.support.place import eventually
from tests.support.servers import RabbitMQ
from tests.support.web import Web


@pytest.fixture
def other(rabbitmq: RabbitMQ) -> Iterator[OwnVhost]:
    """A second broker, as far as a store can tell."""
    vhost = rabbitmq.add_vhost()
    yield OwnVhost.furnished(rabbitmq, vhost)
    rabbitmq.drop_vhost(vhost)


async def refusal(daemon: DaemonProcess) -> str:
    """The next step that a refused daemon logs, whichever of its servers it reaches last."""

    def refusals() -> list[str]:
        return [one["next_step"] for one in daemon.events if one["event"] in ("broker refused", "store refused")]

    return (await eventually(refusals))[0]


def destinations(place: OwnVhost) -> set[str]:
    """The queues and exchanges bound to exchanges of this place."""
    bindings = place.rabbitmq.api("GET", f"/api/bindings/{quote(place.vhost, safe='')}")
    return {one["destination"] for one in bindings if one["source"]}


async def test_a_second_broker_gets_none_of_the_messages(
    place: OwnVhost, other: OwnVhost, store: str, tmp_path: Path
) -> None:
    config = tmp_path / "delayer.toml"
    other.write(config, "store", {"store": {"url": store}})
    async with place.working(place.environ("store", store)) as (_, raw, inbox):
        await raw.publish(delayed("ours", 4_000))
        async with DaemonProcess(other.environ("store", store)) as second, await other.raw() as their_raw:
            assert "give each broker" in await refusal(second)
            theirs = await their_raw.inbox("inbox")
            await eventually(lambda: "delays" in destinations(other))
            await their_raw.publish(delayed("theirs", 100))
            with pytest.raises(RuntimeError, match="the store belongs to another broker, for which 1 other daemon"):
                await command(config, "check")
            with pytest.raises(RuntimeError, match="daemons work for this store: 1"):
                await command(config, "topology", "apply", "--accept-broker")
            await inbox.got([b"ours"])
            assert not theirs.arrivals
            await eventually(lambda: other.things.depth("delays") == 1)


@pytest.mark.parametrize("mode", ["store", "native"])
async def test_the_daemon_of_a_second_broker_is_not_ready(
    place: OwnVhost, other: OwnVhost, store: str, mode: str
) -> None:
    async with DaemonProcess(place.environ(mode, store)) as first:
        await first.ready()
        await first.event("lane taken")
        async with DaemonProcess(other.environ(mode, store) | ANY_PORT) as second:
            await second.event("store refused")
            web = await Web.of(second)
            answer = await eventually(lambda: web.get("/health/ready"), lambda answer: answer.status == 503)
            assert any("the store belongs to another broker" in reason for reason in answer.json["reasons"])


async def test_a_drain_between_two_brokers_is_refused(
    place: OwnVhost, other: OwnVhost, store: str, tmp_path: Path
) -> None:
    config = tmp_path / "delayer.toml"
    async with place.working(place.environ("store", store)) as (_, raw, _):
        await raw.publish(delayed("ours", 3_600_000))
        for mode in ("native", "store"):
            other.write(config, mode, {"store": {"url": store}})
            with pytest.raises(RuntimeError, match="the store belongs to another broker, for which 1 other daemon"):
                await command(config, "drain", "--to", mode, "--yes")
        assert destinations(other) == {"inbox"}


async def test_a_rebuilt_broker_is_accepted_by_a_command(
    place: OwnVhost, other: OwnVhost, store: str, tmp_path: Path
) -> None:
    config = tmp_path / "delayer.toml"
    other.write(config, "store", {"store": {"url": store}})
    async with place.working(place.environ("store", store)) as (daemon, raw, _):
        await raw.publish(delayed("waiting", 2_000))
        assert await daemon.stop() == 0
    async with DaemonProcess(other.environ("store", store)) as daemon, await other.raw() as raw:
        inbox = await raw.inbox("inbox")
        assert "topology apply --accept-broker" in await refusal(daemon)
        await command(config, "topology", "apply", "--accept-broker")
        await daemon.ready()
        await inbox.got([b"waiting"])
    async with DaemonProcess(place.environ("store", store)) as daemon:
        assert await refusal(daemon)
