"""Requests without a message's bytes, and the plan for a request on the route of its exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from delayer.core import plan
from delayer.core.delay_headers import DelayRequest


@dataclass(frozen=True)
class PlainProperties:
    """Properties as values: satisfies delay_headers.RequestProperties."""

    timestamp: int | None = None
    message_id: bytes | None = None
    reply_to: bytes | None = None
    expiration: bytes | None = None
    correlation_id: bytes | None = None

    def short(self, name: str) -> bytes | None:
        found: bytes | None = getattr(self, name, None)
        return found

    def names(self) -> Sequence[bytes]:
        return ()


def request(
    exchange: bytes, routing_key: bytes, headers: Mapping[bytes, object], *, body: bytes = b"", **more: Any
) -> DelayRequest:
    """``more``: the request's ``copies`` and ``chance``, and the properties."""
    rest = {name: more.pop(name) for name in ("copies", "chance") if name in more}
    return DelayRequest(exchange, routing_key, headers, PlainProperties(**more), body, **rest)


def decide(request: DelayRequest, policy: plan.Policy, now_ms: int, now_lower_ms: int | None = None) -> plan.Plan:
    decided = plan.decide(request, policy.routes.get(request.exchange), policy, now_ms, now_lower_ms)
    return decided.plan if isinstance(decided, plan.Retry) else decided
