"""Users: passwords, permissions in each virtual host, and permissions by routing key for topic exchanges."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from tests.simulation.broker.wire import Code, Refusal

Right = Literal["configure", "write", "read"]


@dataclass(frozen=True)
class Permissions:
    """Regular expressions; empty ones match nothing."""

    configure: str = ""
    write: str = ""
    read: str = ""

    def grant(self, right: Right, name: str) -> bool:
        pattern: str = getattr(self, right)
        return bool(re.search(pattern or "^$", name))


@dataclass
class User:
    """``permissions`` by virtual host, ``topics`` by virtual host and exchange."""

    name: str
    password: str
    tags: frozenset[str] = frozenset()
    permissions: dict[str, Permissions] = field(default_factory=dict)
    topics: dict[tuple[str, str], Permissions] = field(default_factory=dict)

    def check(self, right: Right, kind: str, name: str, vhost: str) -> None:
        """Raises Refusal."""
        name = name or "amq.default"
        if not self.permissions[vhost].grant(right, name):
            text = f"access to {kind} '{name}' in vhost '{vhost}' refused for user '{self.name}'"
            raise Refusal(Code.ACCESS_REFUSED, text)

    def check_topic(self, right: Right, exchange: str, key: bytes, vhost: str) -> None:
        """Raises Refusal."""
        rule = self.topics.get((vhost, exchange))
        word = key.decode("utf-8", "replace")
        if rule is not None and not re.search(getattr(rule, right) or "^$", word):
            text = (
                f"access to topic '{word}' in exchange '{exchange}' in vhost '{vhost}' refused for user '{self.name}'"
            )
            raise Refusal(Code.ACCESS_REFUSED, text)
