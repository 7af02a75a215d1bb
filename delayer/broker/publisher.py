"""The publishing side of the relay: confirmed, mandatory, and exact about which message the broker objects to.

A publish to an exchange that is missing, internal or closed to us makes the broker close the channel, which leaves
every unconfirmed publish on it in doubt. So an exchange is first tried with one message alone, on a channel beside the
shared one; only when the broker took that one or returned it does the rest of a batch follow, all on the shared one.

Should the broker close the shared channel all the same (the exchange was deleted meanwhile; topic permissions depend
on the key), then as many messages as were in doubt are next published one at a time, in small batches, until the one
that closes the channel is known; its exchange is left alone with its messages for a while (delayer.broker.caution).
Slow, rare, and nobody is stopped for good.

Should the broker close the whole connection for what was sent, then as many go alone too, on a connection of their own
(delayer.broker.apart): the one that ends it again is known, and held with the broker's words. From then on that one
never goes by a connection that others use.

What is not answered in time is tried aside, so that a queue that does not answer stops nobody else
(delayer.broker.aside).

A returned message is known by its token. Copies of one message (repeated after a fault, on their way through the
cascade or on their way here) share theirs; so only one of them at a time goes over the shared channel.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import structlog

from delayer.broker.alone import Objection, Probe, concerns_exchange, confirming, left
from delayer.broker.apart import Apart, ends_connections
from delayer.broker.aside import Aside
from delayer.broker.caution import Caution
from delayer.broker.doubts import others
from delayer.broker.relay import Relay
from delayer.core.errors import BrokerLost, Unconfirmed
from delayer.core.message import CONFIRMED, Outcome, Outgoing
from delayer.wire.channel import Channel
from delayer.wire.connection import Connection
from delayer.wire.errors import ChannelClosed, ConfirmTimeout, ConnectionLost

log = structlog.get_logger(__name__)

CONFIRM_TIMEOUT: Final = 8.0
"""Seconds to wait for the confirms of a batch: less than the idle timeout of the store transaction behind it."""
OVERHEAD: Final = 8 + 12
"""Bytes of a content-header frame around the properties: type, channel, size and end; class, weight and body size."""
MAX_PROPERTIES: Final = 131_072 - OVERHEAD
"""What fits RabbitMQ's default frame; assumed before the first connection."""
MARGIN: Final = 0.5
"""Seconds after the confirm timeout in which whatever else hangs, such as the opening of a channel, is given up."""
OPENING: Final = 3.0
"""Seconds for a channel to be opened while something is not answered; as a rule it takes two round trips."""


class RelayPublisher:
    """Satisfies ports.Publisher. Several publishes may be in flight on its one channel."""

    def __init__(
        self,
        relay: Relay,
        *,
        aside: Aside | None = None,
        confirm_timeout: float = CONFIRM_TIMEOUT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``aside``: where destinations are tried that do not answer; without it, who waits for them waits."""
        self._relay = relay
        self._aside = aside
        self._apart = Apart(relay)
        self._timeout = confirm_timeout
        self._channel: Channel | None = None
        self._opening = asyncio.Lock()
        self._tokens: set[bytes] = set()  # in flight on the shared channel
        self._caution = Caution(clock)
        self._max_properties = MAX_PROPERTIES

    @property
    def ready(self) -> bool:
        """Connected, and not blocked by a resource alarm of the broker."""
        connection = self._relay.current
        return connection is not None and not connection.blocked

    @property
    def max_properties(self) -> int:
        """Bytes of properties that fit a frame, as last negotiated."""
        connection = self._relay.current
        if connection is not None:
            self._max_properties = connection.frame_max - OVERHEAD
        return self._max_properties

    @property
    def batch_limit(self) -> int:
        """See ports.Publisher."""
        return self._caution.batch_limit

    async def publish(self, batch: Sequence[Outgoing]) -> list[Outcome]:
        """See ports.Publisher. Nothing is published while the broker blocks us.

        Raises Unconfirmed when not everything is answered ``confirm_timeout`` seconds after the call; BrokerLost.
        """
        if not batch:
            return []
        deadline = asyncio.get_running_loop().time() + self._timeout
        outcomes: dict[int, Outcome] = {}
        try:
            async with asyncio.timeout_at(deadline + MARGIN):
                await self._publish(batch, outcomes, deadline)
        except ConfirmTimeout as late:
            self._caution.overdue(len(batch))
            raise self._unconfirmed(batch, outcomes, str(late)) from late
        except TimeoutError as late:
            self._caution.overdue(len(batch))
            text = f"the broker did not take {len(batch)} messages within {self._timeout:g} s"
            raise self._unconfirmed(batch, outcomes, text) from late
        except BrokerLost as lost:
            if not (outcomes and self._caution.apart):
                raise
            # No other connection for the rest: who ends connections is known, and is not to end another for that.
            raise self._unconfirmed(batch, outcomes, str(lost)) from lost
        if len(outcomes) < len(batch):
            self._caution.overdue(len(batch))  # so that fewer destinations are tried for the next one
            text = f"{len(batch) - len(outcomes)} confirms are missing for what was not confirmed before"
            raise self._unconfirmed(batch, outcomes, text)
        self._caution.settled(len(batch), quickly=left(deadline) > self._timeout * 3 / 4)
        return [outcomes[index] for index in range(len(batch))]

    async def close(self) -> None:
        """See ports.Publisher."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.abandon()

    def _unconfirmed(self, batch: Sequence[Outgoing], outcomes: Mapping[int, Outcome], text: str) -> Unconfirmed:
        """What is known goes with it, and is remembered: of a release all comes again, and is not to be repeated."""
        known = [outcomes.get(index) for index in range(len(batch))]
        if self._aside is not None:
            self._aside.given_up(batch, known)
        first = next((message for message, outcome in zip(batch, known, strict=True) if outcome is None), None)
        if first is not None:
            text += f"; the first for exchange {_shown(first.exchange)}, key {_shown(first.routing_key)}"
        return Unconfirmed(text, known)

    async def _publish(self, batch: Sequence[Outgoing], outcomes: dict[int, Outcome], deadline: float) -> None:
        """Enters outcomes as they become known. Those of what does not answer may be missing in the end."""
        connection = await self._usable()
        aside = self._aside
        if aside is not None and aside.alert:
            outcomes |= aside.known(batch)
        await self._apart.first(batch, outcomes, deadline)
        if aside is None or not aside.alert:
            indexes = others(batch, {}, outcomes) if outcomes else range(len(batch))
            return await self._rest(connection, batch, indexes, outcomes, deadline)
        outcomes |= aside.known(batch) | outcomes
        doubtful = aside.doubtful(batch, outcomes)
        ask = aside.ask(batch, doubtful, left(deadline), outcomes, connection)
        asking = asyncio.create_task(ask, name="ask aside")
        await asyncio.sleep(0)  # it begins first
        try:
            await self._rest(connection, batch, others(batch, doubtful, outcomes), outcomes, deadline)
            silent = await asking
            await self._rest(connection, batch, others(batch, silent, outcomes), outcomes, deadline)
        finally:
            asking.cancel()
            await asyncio.wait({asking})
            if not asking.cancelled():
                asking.exception()  # it is raised above, or another one is
        outcomes |= await aside.verdicts(batch, silent)

    async def _rest(
        self,
        connection: Connection,
        batch: Sequence[Outgoing],
        indexes: Sequence[int],
        outcomes: dict[int, Outcome],
        deadline: float,
    ) -> None:
        if indexes and self._caution.apart and (lone := await self._apart.open(deadline)) is not None:
            return await self._one_by_one(lone, batch, indexes, outcomes, deadline)
        # Asked as late as possible: what one message teaches holds for the next.
        alone = (index for index in indexes if self._caution.alone(batch[index].exchange))
        await self._one_by_one(Probe(connection, deadline), batch, alone, outcomes, deadline)
        together, apart = self._reserve(batch, (index for index in indexes if index not in outcomes))
        try:
            await self._together(connection, batch, together, outcomes, deadline)
        finally:
            self._tokens.difference_update(batch[index].token for index in together)
        await self._one_by_one(Probe(connection, deadline), batch, apart, outcomes, deadline)

    async def _usable(self) -> Connection:
        connection = await self._relay.connection(self._timeout)
        try:
            await asyncio.wait_for(connection.unblocked, self._timeout)
        except TimeoutError as late:
            raise BrokerLost("the broker blocks publishers (a resource alarm)") from late
        return connection

    def _reserve(self, batch: Sequence[Outgoing], indexes: Iterable[int]) -> tuple[list[int], list[int]]:
        """Note the tokens that go over the shared channel now. Returns their messages, and those that must not go with
        them: their token is there already, or their exchange has turned out to be delicate."""
        together: list[int] = []
        apart: list[int] = []
        for index in indexes:
            exchange, token = batch[index].exchange, batch[index].token
            if token in self._tokens or self._caution.delicate(exchange):
                apart.append(index)
            else:
                together.append(index)
                self._tokens.add(token)
        return together, apart

    async def _one_by_one(
        self,
        probe: Probe,
        batch: Sequence[Outgoing],
        indexes: Iterable[int],
        outcomes: dict[int, Outcome],
        deadline: float,
    ) -> None:
        """What the broker says of an exchange holds for the rest of the batch."""
        learnt = 0
        closed: dict[bytes, Objection] = {}
        try:
            for index in indexes:
                exchange = batch[index].exchange
                if exchange in closed:
                    outcomes[index] = closed[exchange]
                    continue
                began = time.monotonic()
                try:
                    outcomes[index], objection = await probe.publish(batch[index])
                except ConfirmTimeout:
                    self._suspect([batch[index]])
                    raise
                learnt += 1
                if objection is None:
                    self._caution.took(exchange)
                    self._heard(began, [outcomes[index]])
                elif concerns_exchange(objection):
                    closed[exchange] = objection
                elif ends_connections(objection):
                    self._caution.found_out()
                else:
                    self._caution.objected(exchange)
        except (ConfirmTimeout, TimeoutError, asyncio.CancelledError):
            if not left(deadline):
                self._caution.late(learnt, len(batch))
            raise
        except ConnectionLost as lost:
            self._caution.lost(objects=lost.objects, messages=len(batch))
            raise
        finally:
            probe.close()

    async def _together(
        self,
        connection: Connection,
        batch: Sequence[Outgoing],
        indexes: Sequence[int],
        outcomes: dict[int, Outcome],
        deadline: float,
    ) -> None:
        if not indexes:
            return
        messages = [batch[index] for index in indexes]
        channel = await self._shared(connection)
        began = time.monotonic()
        try:
            shared = await channel.publish(messages, timeout=left(deadline))
        except ConfirmTimeout as late:
            answered = list(zip(indexes, late.outcomes, strict=bool(late.outcomes)))
            outcomes.update((index, outcome) for index, outcome in answered if outcome is not None)
            self._heard(began, [outcome for _, outcome in answered])
            self._suspect([batch[index] for index, outcome in answered if outcome is None])
            raise
        except ChannelClosed as closed:
            log.warning("publish channel closed", reason=str(closed), in_doubt=len(messages))
            self._caution.in_doubt(len(messages))
            raise
        except ConnectionLost as lost:
            self._caution.lost(objects=lost.objects, messages=len(messages))
            raise
        outcomes.update(zip(indexes, shared, strict=True))
        self._heard(began, shared)

    def _heard(self, began: float, outcomes: Sequence[Outcome | None]) -> None:
        if self._aside is not None and CONFIRMED in outcomes:
            self._aside.confirmed(began)

    def _suspect(self, messages: Sequence[Outgoing]) -> None:
        if self._aside is not None and messages:
            self._aside.suspect(messages)

    async def _shared(self, connection: Connection) -> Channel:
        async with self._opening:
            if self._channel is None or self._channel.closed.done():
                self._channel = await self._open(connection)
            return self._channel

    async def _open(self, connection: Connection) -> Channel:
        """Where something is not answered, not for long: a broker whose channel waits may not read its connection."""
        if self._aside is None or not self._aside.alert:
            return await confirming(connection)
        try:
            async with asyncio.timeout(OPENING):
                return await confirming(connection)
        except TimeoutError:
            self._aside.not_heard(self._relay, connection)
            raise


def _shown(name: bytes) -> str:
    return repr(name.decode("utf-8", "backslashreplace"))
