"""The plan for a request, on the route of its exchange."""

from __future__ import annotations

from delayer.core import plan
from delayer.core.delay_headers import DelayRequest


def decide(request: DelayRequest, policy: plan.Policy, now_ms: int, now_lower_ms: int | None = None) -> plan.Plan:
    decided = plan.decide(request, policy.routes.get(request.exchange), policy, now_ms, now_lower_ms)
    return decided.plan if isinstance(decided, plan.Retry) else decided
