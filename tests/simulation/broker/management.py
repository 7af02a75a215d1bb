"""The management API of the simulated broker: the part that delayer and its tests use."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.simulation.broker.access import Permissions, User
from tests.simulation.broker.broker import SimulatedBroker
from tests.simulation.broker.declared import plain
from tests.simulation.broker.message import Message
from tests.simulation.broker.queue import Queue
from tests.simulation.broker.routing import Binding, Exchange
from tests.simulation.broker.vhost import VirtualHost


class NotFound(Exception):
    """404."""


def answer(broker: SimulatedBroker, method: str, path: str, body: Any = None) -> Any:
    """The decoded answer to a request for a path below ``/api``, with its query. Raises NotFound."""
    parts = urlsplit(path)
    words = [unquote(word) for word in parts.path.split("/")]
    query = {name: values[0] for name, values in parse_qs(parts.query).items()}
    try:
        found = _REQUESTS[method, words[0]](broker, words[1:], query if method == "GET" else body)
    except KeyError as missing:
        raise NotFound(f"{method} {path}: {missing}") from missing
    columns = query["columns"].split(",") if "columns" in query else []
    if not columns:
        return found
    if isinstance(found, dict) and "items" in found:
        return found | {"items": _only(found["items"], columns)}
    return _only(found, columns)


def _only(found: Any, columns: list[str]) -> Any:
    if isinstance(found, list):
        return [_only(one, columns) for one in found]
    return {name: found[name] for name in columns if name in found}


def _put_user(broker: SimulatedBroker, words: list[str], body: Any) -> None:
    tags = frozenset(filter(None, body["tags"].split(",")))
    broker.users[words[0]] = User(words[0], body["password"], tags)


def _put_permissions(broker: SimulatedBroker, words: list[str], body: Any) -> None:
    broker.users[words[1]].permissions[words[0]] = Permissions(**body)


def _put_topics(broker: SimulatedBroker, words: list[str], body: Any) -> None:
    rule = Permissions("", body["write"], body["read"])
    broker.users[words[1]].topics[words[0], body["exchange"]] = rule


def _put_limit(broker: SimulatedBroker, words: list[str], body: Any) -> None:
    setattr(broker.vhosts[words[0]], _LIMITS[words[1]], body["value"])


def _drop_limit(broker: SimulatedBroker, words: list[str], _: Any) -> None:
    setattr(broker.vhosts[words[0]], _LIMITS[words[1]], float("inf"))


_LIMITS = {"max-connections": "most_connections"}


def _exchanges(broker: SimulatedBroker, words: list[str], _: Any) -> Any:
    vhost = broker.vhosts[words[0]]
    if len(words) == 1:
        return [_exchange(one) for one in vhost.exchanges.values()]
    exchange = vhost.exchanges[words[1]]
    if words[2:] == ["bindings", "source"]:
        return [_binding(exchange.name, one) for one in exchange.bindings]
    return _exchange(exchange)


def _exchange(one: Exchange) -> dict[str, Any]:
    return {
        "name": one.name,
        "type": one.kind,
        "durable": one.durable,
        "auto_delete": one.auto_delete,
        "internal": one.internal,
        "arguments": {name: plain(value) for name, value in one.arguments.items()},
        "policy": None,
    }


def _queues(broker: SimulatedBroker, words: list[str], query: Any) -> Any:
    vhost = broker.vhosts[words[0]]
    if len(words) > 1:
        queue = vhost.queues[words[1]]
        if words[2:] == ["bindings"]:
            return [_binding("", Binding("queue", queue.name, queue.name.encode())), *_bindings_to(vhost, queue)]
        return _queue(vhost, queue)
    pattern = re.compile(query.get("name", ""), re.IGNORECASE)
    found = [_queue(vhost, one) for one in vhost.queues.values() if pattern.search(one.name)]
    return {"page": 1, "items": found} if "page" in query else found


def _queue(vhost: VirtualHost, one: Queue) -> dict[str, Any]:
    ready, consumers = one.counts()
    unacked = sum(len(consumer.unacked) for consumer in one.consumers)
    return {
        "name": one.name,
        "type": "quorum" if one.quorum else "classic",
        "durable": one.durable,
        "auto_delete": one.auto_delete,
        "arguments": dict(one.values),
        "messages_ready": ready,
        "messages_unacknowledged": unacked,
        "messages": ready + unacked + vhost.dead_letters(one).count,
        "consumers": consumers,
        "members": [vhost.broker.name] if one.quorum else [],
        "online": [vhost.broker.name] * one.available,
        "policy": None,
    }


def _bindings_to(vhost: VirtualHost, queue: Queue) -> list[dict[str, Any]]:
    return [
        _binding(exchange.name, one)
        for exchange in vhost.exchanges.values()
        for one in exchange.bindings
        if (one.kind, one.destination) == ("queue", queue.name)
    ]


def _bindings(broker: SimulatedBroker, words: list[str], _: Any) -> list[dict[str, Any]]:
    every = broker.vhosts[words[0]].exchanges.values()
    return [_binding(exchange.name, one) for exchange in every for one in exchange.bindings]


def _binding(source: str, one: Binding) -> dict[str, Any]:
    return {
        "source": source,
        "destination": one.destination,
        "destination_type": one.kind,
        "routing_key": one.key.decode(),
        "arguments": {name: plain(value) for name, value in one.arguments},
    }


def _publish(broker: SimulatedBroker, words: list[str], body: Any) -> Any:
    vhost = broker.vhosts[words[0]]
    name = "" if words[1] == "amq.default" else words[1]
    message = Message(name.encode(), (body["routing_key"].encode(),), b"\0\0", body["payload"].encode())
    queues = vhost.route(vhost.exchanges[name], message)
    for queue in queues:
        queue.publish(message, bool)
    return {"routed": bool(queues)}


def _put_policy(broker: SimulatedBroker, words: list[str], body: Any) -> None:
    """The policy is listed, and has no effect."""
    broker.vhosts[words[0]].policies[words[1]] = {"vhost": words[0], "name": words[1], "priority": 0} | body


def _leaderless(broker: SimulatedBroker, words: list[str], _: Any) -> Any:
    vhost = broker.vhosts[words[-3]]
    down = [{"name": one.name} for one in vhost.queues.values() if one.quorum and not one.available]
    return {"status": "failed" if down else "ok", "queues": down}


_REQUESTS: dict[tuple[str, str], Callable[[SimulatedBroker, list[str], Any], Any]] = {
    ("PUT", "vhosts"): lambda broker, words, _: broker.add_vhost(words[0]) and None,
    ("DELETE", "vhosts"): lambda broker, words, _: broker.drop_vhost(words[0]),
    ("PUT", "users"): _put_user,
    ("DELETE", "users"): lambda broker, words, _: broker.users.pop(words[0]) and None,
    ("PUT", "permissions"): _put_permissions,
    ("PUT", "topic-permissions"): _put_topics,
    ("PUT", "vhost-limits"): _put_limit,
    ("DELETE", "vhost-limits"): _drop_limit,
    ("GET", "exchanges"): _exchanges,
    ("POST", "exchanges"): _publish,
    ("GET", "queues"): _queues,
    ("GET", "bindings"): _bindings,
    ("PUT", "policies"): _put_policy,
    ("DELETE", "policies"): lambda broker, words, _: broker.vhosts[words[0]].policies.pop(words[1]) and None,
    ("GET", "policies"): lambda broker, words, _: [*broker.vhosts[words[0]].policies.values()],
    ("GET", "operator-policies"): lambda *_: [],
    ("GET", "nodes"): lambda broker, *_: [{"name": broker.name, "mem_alarm": broker.alarmed == "memory",
                                           "disk_free_alarm": broker.alarmed == "disk"}],
    ("GET", "health"): _leaderless,
}  # fmt: skip
