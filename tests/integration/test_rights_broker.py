"""Least privilege: the broker is used with the rights that docs/security.md grants, and with none of them less."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from delayer.broker.errors import BrokerRefused, TopologyMismatch
from delayer.broker.management_api import Management
from delayer.config.model import Settings
from delayer.config.topology import cascade_of
from delayer.core.errors import BrokerLost
from tests.integration.rights import MODES, patterns_of, use, user_url
from tests.support.servers import RabbitMQ

NAMES = {
    "store": ("delays", "delays.refused", "delayer.in", "delayer.out"),
    "native": (
        "delays", "delays.refused", "delays.due", "delayer.in", "delayer.out", "delayer.delay-level-27",
        "delayer.delay-level-00", "delayer.delay-delivery", "delayer.delay-strays",
    ),
}  # fmt: skip
TAKEN = [
    (mode, kind, name)
    for mode in MODES
    for kind, pattern in patterns_of(mode)._asdict().items()
    for name in NAMES[mode]
    if re.fullmatch(pattern, name)
]


@pytest.fixture(scope="module")
def vhost_name(rabbitmq: RabbitMQ) -> Iterator[str]:
    name = rabbitmq.add_vhost()
    rabbitmq.api("PUT", f"/api/exchanges/{name}/delayer.out", {"type": "topic", "durable": True})
    yield name
    rabbitmq.drop_vhost(name)


async def use_in(mode: str, url: str) -> None:
    """Declare, consume and publish whatever a daemon of this mode does."""
    settings = Settings.model_validate({"mode": mode})
    consumed, published = ["delays"], ["delayer.out", "delays.refused"]
    if mode == "native":
        cascade = cascade_of(settings)
        consumed.append("delays.due")
        published += [level.name for level in cascade.levels()] + [cascade.strays]
    await use(url, settings, consumed, published, b"0." * 28 + b"nobody")


@pytest.mark.parametrize("mode", MODES)
async def test_the_broker_is_used_with_these_rights(rabbitmq: RabbitMQ, vhost_name: str, mode: str) -> None:
    await use_in(mode, user_url(rabbitmq, vhost_name, patterns_of(mode)))


@pytest.mark.parametrize(("mode", "kind", "name"), TAKEN)
async def test_each_of_them_is_needed(rabbitmq: RabbitMQ, vhost_name: str, mode: str, kind: str, name: str) -> None:
    whole = patterns_of(mode)
    pattern = getattr(whole, kind).replace("^", f"^(?!{re.escape(name)}$)", 1)
    url = user_url(rabbitmq, vhost_name, whole._replace(**{kind: pattern}))
    with pytest.raises((BrokerRefused, TopologyMismatch, BrokerLost), match=r"ACCESS_REFUSED|refused"):
        await use_in(mode, url)


async def test_the_management_api_shows_what_is_asked_of_it(rabbitmq: RabbitMQ, vhost_name: str) -> None:
    """To a user with the tag ``management`` who may do nothing at all in the virtual host."""
    user = "delayer-monitor"
    rabbitmq.add_user(user, user, vhost=vhost_name)
    rabbitmq.api("PUT", f"/api/users/{user}", {"password": user, "tags": "management"})
    management = Management(rabbitmq.management_url.replace("guest:guest", f"{user}:{user}"), vhost_name)
    await management.bindings_from("delayer.out")
    await management.policies()
