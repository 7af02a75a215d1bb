"""Source `hold-queues`: queues that hold messages for a time and then dead-letter them, one queue for each duration.

Examples are Symfony's ``delay_…``, Laravel's ``….delay.<ms>``, enqueue's ``….delayed``, EasyNetQ's, MailerQ's powers of
two, and the pair of a work queue and a retry queue. The queue's arguments or policy, read from the management API, say
where messages go and how long the queue holds them. The command's options override them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

from delayer.amqp.properties import Properties, splice
from delayer.amqp.values import Delivery
from delayer.broker.admin import Admin
from delayer.broker.management_api import Management
from delayer.core import hold as core_hold
from delayer.core.importing import ImportItem, given
from delayer.core.marks import X_DEATH
from delayer.core.message import LONGEST_EXPIRATION_MS, Parcel, Target
from delayer.imports.brokers import address_of, translate_broker_errors
from delayer.imports.queues import Queues, Reader
from delayer.imports.state_machine import BadSource, ImportImpossible

COPIES: Final = b"CC"
SENT_AGAIN: Final = re.compile(r"_retry(_\d{4}-\d\d-\d\d)?\Z")
"""Suffix of Symfony's queues for messages that workers sent again, with old timestamps; 8.1 can use one per day."""

NO_TIME: Final = (
    "the message does not say for how long it is held, nor does what is known of its queue (by --ttl, or by the "
    "management API)"
)


@dataclass(slots=True)
class HoldQueue:
    """Satisfies queues.Reader for one queue. ``ttl_ms``: None if only the messages' expiration applies. ``stamped``:
    whether timestamps are arrival times."""

    queue: str
    exchange: bytes
    routing_key: bytes | None
    ttl_ms: int | None
    stamped: bool = False
    last_ms: int = 0
    """The latest due instant so far. Messages after that one arrived later, so none is due sooner."""

    @property
    def target(self) -> Target | None:
        return None if self.routing_key is None else Target(self.exchange, self.routing_key)

    def latest_ms(self, now_ms: int) -> int | None:
        return None if self.ttl_ms is None else now_ms + self.ttl_ms

    def item(self, delivery: Delivery, properties: Properties | None, now_ms: int) -> ImportItem:
        own = delivery.routing_key if self.routing_key is None else self.routing_key
        wait_ms = self._wait_ms(properties)
        hold: core_hold.Hold | None = None
        if wait_ms is None:
            hold, wait_ms = core_hold.unfit(NO_TIME), 0
        if (self.exchange, own) == (b"", self.queue.encode()):
            hold = core_hold.unfit("its queue would give it back to itself")
        due_ms = self._due_ms(properties, wait_ms, now_ms)
        return ImportItem(
            Parcel(
                due_ms, self.queue.encode(), delivery.exchange, delivery.routing_key, Target(self.exchange, own),
                _dead_lettered(delivery.properties, properties, rerouted=self.routing_key is not None), delivery.body,
            ),
            hold,
        )  # fmt: skip

    def _wait_ms(self, properties: Properties | None) -> int | None:
        """Return the time to dead-lettering: the smaller of TTL and expiration, as in the broker; None without both."""
        said = [] if self.ttl_ms is None else [self.ttl_ms]
        expiration = None if properties is None else properties.short("expiration")
        if expiration is not None and expiration.isdigit():
            said.append(min(int(expiration), LONGEST_EXPIRATION_MS))
        return min(said, default=None)

    def _due_ms(self, properties: Properties | None, wait_ms: int, now_ms: int) -> int:
        """Return the due instant, epoch ms. Never early: a timestamp counts only if it gives an instant between now and
        the whole delay from now.

        A message whose time is over by its timestamp would be gone from the queue. So the timestamp must be that of its
        first publish, and the message may have arrived just now.
        """
        latest_ms = now_ms + wait_ms
        came = self._came_ms(properties)
        if came is None or came + wait_ms <= now_ms:
            return latest_ms
        due_ms = min(came + wait_ms, latest_ms)
        if self.ttl_ms is not None and wait_ms == self.ttl_ms:
            due_ms = self.last_ms = max(due_ms, min(self.last_ms, latest_ms))
        return due_ms

    def _came_ms(self, properties: Properties | None) -> int | None:
        """Return the arrival, at the end of that second: the timestamp, if --believe-timestamps says that publishers
        set it.

        None for dead-lettered messages and Symfony's retry queues, where the timestamp is that of the first publish.
        """
        if not self.stamped or SENT_AGAIN.search(self.queue) or properties is None:
            return None
        if properties.timestamp is None or properties.get(X_DEATH) is not None:
            return None
        return (properties.timestamp + 1) * 1000


async def _queues(management: Management) -> dict[str, dict[str, Any]]:
    """List the vhost's queues with the arguments that apply to their messages, including policies under the names of
    arguments. The shortest TTL wins, as in the broker."""
    found = {}
    shape = {"name": str, "arguments": dict | None, "effective_policy_definition": dict | None}
    for queue, own, policy in await management.get(f"queues/{management.vhost}?columns={','.join(shape)}", [shape]):
        arguments = dict(own or {})
        for name, value in (policy or {}).items():
            argument = f"x-{name}"
            if name == "message-ttl" and argument in arguments:
                arguments[argument] = min(arguments[argument], value)
            else:
                arguments.setdefault(argument, value)
        found[queue] = arguments
    return found


def _dead_lettered(raw: bytes, properties: Properties | None, *, rerouted: bool) -> bytes:
    """Edit the properties as the broker does when dead-lettering: drop the expiration, which has taken effect, and
    further keys if the queue sets the key."""
    if properties is None:
        return raw
    return splice(properties, remove=(COPIES,) if rerouted else (), drop=("expiration",))


@dataclass(eq=False, repr=False, kw_only=True)
class HoldQueues(Queues):
    """Reads the queues that match ``patterns``, shortest TTL first. ``ttl_ms``, ``to_exchange`` and ``to_key`` override
    arguments and policies. ``believe_timestamps``: timestamps are arrival times. ``own``: delayer's queues, never
    read."""

    name = "hold-queues"
    patterns: Sequence[str]
    ttl_ms: int | None = None
    to_exchange: str | None = None
    to_key: str | None = None
    believe_timestamps: bool = False
    own: Collection[str] = ()

    def more_parameters(self) -> Mapping[str, object]:
        believe = self.believe_timestamps or None
        more = given(ttl_ms=self.ttl_ms, to_exchange=self.to_exchange, to_key=self.to_key, believe_timestamps=believe)
        return {"queues": list(self.patterns), **more}

    async def readers(self, admin: Admin) -> list[Reader]:
        told = await self._told()
        if not told:
            raise ImportImpossible(f"no queue with a time to live matches {', '.join(self.patterns)}")
        for name in told.keys() - set(self.patterns):
            state = await translate_broker_errors(admin.state(name))
            if state is not None and state.consumers:
                raise ImportImpossible(f"queue {name} has consumers. Next: name each queue to read, or other patterns")
        holds = [self._hold(name, arguments) for name, arguments in sorted(told.items())]
        holds.sort(key=lambda hold: (hold.ttl_ms is None, hold.ttl_ms or 0))
        return list(holds)

    async def _told(self) -> dict[str, Mapping[str, Any]]:
        """List the matching queues with their arguments, including policies under the names of arguments. A queue
        without TTL, such as the work queue of a retry pair, matches only by its full name."""
        if not self.management_url:
            if any(set("*?[") & set(pattern) for pattern in self.patterns):
                raise ImportImpossible(
                    "patterns need broker.management_url; without it, name each queue, and say --ttl and --exchange"
                )
            return {name: {} for name in self.patterns}
        address = address_of(self.url)
        try:
            management = Management(self.management_url, address.vhost, timeout=30.0, tls=address.tls)
        except ValueError as error:
            raise BadSource(f"the source's {error}") from None
        told = await translate_broker_errors(_queues(management))
        matching = {name for name in told for pattern in self.patterns if fnmatchcase(name, pattern)} - set(self.own)
        holding = {name for name in matching if "x-message-ttl" in told[name]}
        return {name: arguments for name, arguments in told.items() if name in holding or name in self.patterns}

    def _hold(self, name: str, arguments: Mapping[str, Any]) -> HoldQueue:
        exchange = arguments.get("x-dead-letter-exchange") if self.to_exchange is None else self.to_exchange
        key = arguments.get("x-dead-letter-routing-key") if self.to_key is None else self.to_key
        ttl = arguments.get("x-message-ttl") if self.ttl_ms is None else self.ttl_ms
        if exchange is None and not self.management_url:
            raise ImportImpossible(
                f"queue {name}: its dead-letter exchange cannot be seen without a management URL. Next: set "
                "broker.management_url (--management-url for --from-url), or say --exchange, --ttl, and "
                "--routing-key if it dead-letters with a key of its own"
            )
        if exchange is None:
            raise ImportImpossible(
                f"queue {name}: expected a dead-letter exchange, found none, so it does not hold messages for a "
                "time. Next: --exchange, or other queues"
            )
        return HoldQueue(
            name,
            str(exchange).encode(),
            None if key is None else str(key).encode(),
            None if ttl is None else int(ttl),
            stamped=self.believe_timestamps,
        )
