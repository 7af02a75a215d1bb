"""Compares a broker with a topology, without changes.

AMQP shows whether a part exists (passive declaration), and whether it is as configured (active declaration, which
changes nothing or is refused). Only the management API has bindings and policies. Without it, they count as unknown.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import quote

from delayer.amqp.errors import ChannelClosed, ReplyCode
from delayer.broker.admin_connection import AdminConnection
from delayer.broker.errors import BrokerRefused, BrokerUnreachable, TopologyFinding, TopologySeverity
from delayer.broker.management_api import Management
from delayer.broker.pipelined_admin import DELAYS_FROM, check, declaration
from delayer.core.cascade import LEVELS, bindable
from delayer.core.topology import Binding, Exchange, Queue, Topology

# These keys of a policy change when, or whether, a message leaves a queue. The smaller of two TTLs applies.
RISKY_POLICY_KEYS = frozenset(
    {"message-ttl", "expires", "max-length", "max-length-bytes", "overflow", "delivery-limit", "consumer-timeout"}
    | {"delayed-retry-type", "delayed-retry-min", "delayed-retry-max"}
    | {"dead-letter-exchange", "dead-letter-routing-key", "dead-letter-strategy"}
)


class BrokerPolicy(NamedTuple):
    """``applies_to``: all, queues, exchanges, classic_queues, quorum_queues, streams. ``pattern``: of names."""

    name: str
    pattern: str
    applies_to: str
    priority: int
    definition: dict[str, Any]
    by_operator: bool


async def policies_of(management: Management) -> list[BrokerPolicy]:
    """Read all policies and operator policies of the vhost."""
    shape = [{"name": str, "pattern": str, "apply-to": str, "priority": int, "definition": dict}]
    return [
        BrokerPolicy._make((*policy, by_operator))
        for path, by_operator in (("policies", False), ("operator-policies", True))
        for policy in await management.get(f"{path}/{management.vhost}", shape)
    ]


async def bindings_from(management: Management, exchange: str) -> list[tuple[Binding, dict[str, Any]]]:
    """Read all bindings of the source ``exchange``, which must exist, with their arguments."""
    return await management.bindings(f"exchanges/{management.vhost}/{quote(exchange, safe='')}/bindings/source")


@dataclass
class Verifier:
    """One comparison of a broker with a topology."""

    connection: AdminConnection
    topology: Topology
    management: Management | None

    async def findings(self) -> list[TopologyFinding]:
        """Return all differences, and all parts that could not be checked. Raises BrokerUnreachable.

        A missing permission or a silent management API is a finding of severity "unknown".
        """
        things: tuple[Exchange | Queue, ...] = (*self.topology.exchanges, *self.topology.queues)
        compared = [await self._part_finding(one) for one in things]
        found = [finding for finding in compared if finding is not None]
        missing = {finding.name for finding in found if finding.state == "missing"}
        if self.management is not None:
            try:
                seen = await self._binding_findings(self.management, missing) + await self._policy_findings(
                    self.management
                )
                seen += await self._down_findings(self.management)
                return found + seen + await self._copy_findings(self.management)
            except (BrokerRefused, BrokerUnreachable) as error:
                found.append(self._unseen(f"{error}"))
        else:
            found.append(self._unseen("no management_url is configured"))
        return found

    async def _part_finding(self, wanted: Exchange | Queue) -> TopologyFinding | None:
        """Declare passively first, because an active declaration would create a missing part."""
        try:
            answer = await self.connection.ask(check(wanted))
            if not isinstance(answer, ChannelClosed):
                answer = await self.connection.ask(declaration(wanted))
        except BrokerRefused as error:
            return TopologyFinding(wanted.kind, wanted.name, str(wanted), str(error), "unknown")
        if not isinstance(answer, ChannelClosed):
            return None
        if answer.code == ReplyCode.NOT_FOUND:
            return TopologyFinding(wanted.kind, wanted.name, str(wanted), "nothing", state="missing")
        return TopologyFinding(wanted.kind, wanted.name, str(wanted), answer.text)

    async def _binding_findings(self, management: Management, missing: set[str]) -> list[TopologyFinding]:
        """Findings about bindings, from the management API."""
        wanted: dict[str, list[Binding]] = {exchange.name: [] for exchange in self.topology.exchanges}
        for binding in self.topology.bindings:
            wanted.setdefault(binding.source, []).append(binding)
        sources = [source for source in wanted if source not in missing]
        every = await asyncio.gather(*(bindings_from(management, source) for source in sources))
        exchanges = {exchange.name: exchange for exchange in self.topology.exchanges}
        return [
            finding
            for source, rows in zip(sources, every, strict=True)
            for finding in _compare_bindings(source, exchanges.get(source), wanted[source], rows, missing)
        ]

    async def _policy_findings(self, management: Management) -> list[TopologyFinding]:
        """Findings about policies that override the queues' arguments."""
        expected = "no policy about expiry, length, dead letters, retries or timeouts"
        policies = await policies_of(management)
        return [
            TopologyFinding("policy", queue.name, expected, f"{policy.name!r} with {risky}")
            for queue in self.topology.queues
            for policy in policies_in_force(policies, queue)
            if (risky := {key: value for key, value in policy.definition.items() if key in RISKY_POLICY_KEYS})
        ]

    async def _down_findings(self, management: Management) -> list[TopologyFinding]:
        """Findings about queues whose process has ended. In RabbitMQ 4.4 a single message can cause that."""
        if self.connection.version < DELAYS_FROM:
            return []
        path = f"health/checks/quorum-queues-without-elected-leaders/vhost/{management.vhost}/pattern/.*"
        _, down = await management.get(path, {"status": str, "queues": [{"name": str}]}, 503)
        return [
            TopologyFinding("queue", one.name, "running", "down: it gives and takes nothing", state="down")
            for one in self.topology.queues
            if (one.name,) in down
        ]

    async def _copy_findings(self, management: Management) -> list[TopologyFinding]:
        """Findings about queues without a majority, and our queues with a single copy, on one node of a cluster."""
        members = await management.members(one.name for one in self.topology.queues)
        seen = [(one, members[one.name]) for one in self.topology.queues if one.name in members]
        expected = "a majority of its members online"
        lost = [
            TopologyFinding("queue", one.name, expected, few, state="minority")
            for one, of in seen
            if (few := of.minority)
        ]
        alone = [one for one, of in seen if not one.shared and of.copies == 1]
        if not alone:
            return lost
        try:
            nodes = len(await management.get("nodes?columns=name", [dict]))
        except BrokerRefused as refused:
            found = f"whether the broker is a cluster cannot be seen: {refused}; give this user the tag `monitoring`"
            return [*lost, TopologyFinding("queue", "*", "copies on several nodes of a cluster", found, "unknown")]
        expected, found = f"copies on several of the cluster's {nodes} nodes", "one copy"
        return lost + [TopologyFinding("queue", one.name, expected, found, state="alone") for one in alone if nodes > 1]

    def _unseen(self, reason: str) -> TopologyFinding:
        expected = f"{len(self.topology.bindings)} bindings, and no policy that drops messages"
        found = f"bindings, policies and the copies of queues cannot be seen: {reason}"
        return TopologyFinding("binding", "*", expected, found, "unknown")


def _compare_bindings(
    source: str,
    exchange: Exchange | None,
    wanted: Sequence[Binding],
    rows: Sequence[tuple[Binding, dict[str, Any]]],
    missing: set[str],
) -> list[TopologyFinding]:
    """Findings about ``rows``, the bindings of ``source``."""
    # Bindings with arguments are not ours, but topic and fanout exchanges also route by them.
    present = {binding for binding, arguments in rows if not arguments}
    found = [
        TopologyFinding("binding", source, str(binding), "nothing", state="missing")
        for binding in wanted
        if binding not in present and binding.destination not in missing
    ]
    if exchange is None or exchange.shared:
        return found
    severity: TopologySeverity = "error" if exchange.closed else "note"
    for binding in sorted({binding for binding, _ in rows}.difference(wanted), key=str):
        if exchange.closed or not _is_address(binding.key):
            found.append(TopologyFinding("binding", source, "no other binding", str(binding), severity))
    return found


def covers(policy: BrokerPolicy, queue: Queue) -> bool:
    """Whether the policy applies to the queue. A pattern of Erlang that Python cannot parse counts as matching every
    name."""
    kind = queue.argument("x-queue-type")
    if policy.applies_to not in ("all", "queues") and (kind is None or policy.applies_to != f"{kind}_queues"):
        return False
    try:
        return re.search(policy.pattern, queue.name) is not None
    except re.error:
        return True


def policies_in_force(policies: Iterable[BrokerPolicy], queue: Queue) -> list[BrokerPolicy]:
    """Return the user policy and the operator policy of the highest priority for this queue."""
    covering = sorted((policy for policy in policies if covers(policy, queue)), key=lambda policy: policy.priority)
    return list({policy.by_operator: policy for policy in covering}.values())


def _is_address(key: str) -> bool:
    """Whether a key is one of :func:`delayer.core.cascade.delivery_binding`, which users may bind."""
    stars = "*." * LEVELS
    return key.startswith(stars) and bindable(key[len(stars) :].encode())
