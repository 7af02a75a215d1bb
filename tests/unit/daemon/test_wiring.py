"""Settings, translated into the values of the lower layers."""

from __future__ import annotations

from typing import Any

import pytest

from delayer.config.model import Settings
from delayer.config.topology import cascade_of, native_of, queues_at_work, topology_of, uses_cascade, without_effect
from delayer.core.cascade import ONE_CONSUMER, Cascade
from delayer.core.plan import Mode, Route
from delayer.daemon.live_settings import policy_of


def settings(**tables: Any) -> Settings:
    return Settings.model_validate(tables)


def test_no_message_enters_a_cascade_that_is_taken_over() -> None:
    tables = {"takeover": [{"cascade": "celery"}, {"cascade": "nservicebus-v2"}]}
    policy = policy_of(settings(**tables), has_store=True)
    assert policy.own_queues == {name.encode() for name in queues_at_work(settings(**tables))}
    ours = {b"delayer.delay-level-00", b"delayer.delay-strays"}
    assert {*ours, b"celery_delayed_0", b"nsb.v2.delay-level-01"} < policy.own_queues
    assert {*ours, b"delayer.delay-delivery"} < policy.own_exchanges
    assert not {b"celery_delayed_0", b"nsb.v2.delay-level-01"} & policy.own_exchanges


def test_the_policy_has_every_key_of_a_route() -> None:
    route = {
        "from": "grün", "to": "", "routing_key": "mail.inbox", "delay_from": ["timestamp"], "default_delay": "5s",
        "allow_exchanges": ["shop.*"], "exchange_from_reply_to": True,
    }  # fmt: skip
    policy = policy_of(
        settings(
            route=[route, {"from": "", "require_delay": True, "routing_key_header": "to", "key_from": "header:no"}],
            mode="native",
        ),
        has_store=False,
    )
    assert policy.routes == {
        "grün".encode(): Route("grün".encode(), b"", b"mail.inbox", ("timestamp",), 5000, ("shop.*",), True),
        b"": Route(b"", b"", require_delay=True, routing_key_header=b"to", key_from="header:no"),
    }
    assert policy.mode is Mode.NATIVE
    assert not policy.has_store
    assert not policy.no_keys


def test_shared_consumers_refuse_keys() -> None:
    given = settings(intake={"consumers": "shared"})
    assert 'consumers = "shared" cannot keep keys in order' in policy_of(given, has_store=True).no_keys
    (queue,) = [queue for queue in topology_of(given).queues if queue.name == "delays"]
    assert queue.argument(ONE_CONSUMER) is None
    (queue,) = [queue for queue in topology_of(settings()).queues if queue.name == "delays"]
    assert queue.argument(ONE_CONSUMER) is True


@pytest.mark.parametrize(
    ("tables", "uses"), [({}, False), ({"mode": "native"}, True), ({"store": {"park_beyond": "10s"}}, True)]
)
def test_the_cascade_is_declared_only_if_it_is_used(tables: dict[str, Any], uses: bool) -> None:
    given = settings(**tables)
    names = {queue.name for queue in topology_of(given).queues}
    assert uses_cascade(given) is uses
    assert ("delayer.delay-level-27" in names) is uses
    assert ("delays.due" in names) is uses
    assert {"delays", "delays.refused"} <= names


def test_names_come_from_the_settings() -> None:
    given = settings(
        mode="native",
        native={"prefix": "shop.", "due_queue": "d"},
        intake={"queue": "i"},
        refused={"queue": "r"},
        route=[{"from": "a", "to": "out"}, {"from": "", "to": "out"}],
    )
    assert cascade_of(given) == Cascade(prefix="shop.")
    whole = topology_of(given)
    assert {"d", "i", "r", "shop.delay-level-00"} <= {queue.name for queue in whole.queues}
    assert "a" in {exchange.name for exchange in whole.exchanges}
    assert "" not in {exchange.name for exchange in whole.exchanges}
    assert {queue.name for queue in native_of(given).queues} < {queue.name for queue in whole.queues}


@pytest.mark.parametrize(
    ("tables", "name", "key"),
    [
        ({}, "delays", "intake.queue"), ({"intake": {"queue": "in"}}, "in", "intake.queue"),
        ({"refused": {"queue": "bad"}}, "bad", "refused.queue"),
        ({"native": {"due_queue": "due"}}, "due", "native.due_queue"),
        ({"native": {"prefix": "x."}}, "x.delay-level-27", "native.prefix"),
        ({}, "delayer.delay-strays", "native.prefix"),
        ({"takeover": [{"cascade": "celery", "prefix": "shop"}]}, "shop_celery_delayed_27", "takeover.cascade"),
        ({"intake": {"queue": "in"}}, "delays", None), ({}, "delay_messages__600000_delay", None),
    ],
)  # fmt: skip
def test_queues_that_a_daemon_works_with(tables: dict[str, Any], name: str, key: str | None) -> None:
    assert queues_at_work(settings(**tables)).get(name) == key


def test_rates_are_without_effect_in_native_mode() -> None:
    routes = [{"from": "a", "to": "b", "max_rate": 5}, {"from": "c", "to": "b"}]
    assert without_effect(settings(route=routes)) == []
    assert without_effect(settings(route=routes, mode="native")) == ["a"]
