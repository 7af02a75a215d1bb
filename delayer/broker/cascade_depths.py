"""The depths of a cascade: the number of messages in each level, and in the queues around it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from delayer.amqp.errors import BrokerLost, ChannelClosed, ReplyCode
from delayer.broker.errors import BrokerRefused
from delayer.broker.pipelined_admin import PATIENCE, pipelined_admin
from delayer.core.cascade import LEVELS, Cascade


@dataclass(frozen=True, slots=True)
class LevelState:
    """One level of a cascade. ``depth``: messages ready in its queue; None if the queue is missing."""

    level: int
    name: str
    ttl_ms: int
    depth: int | None


@dataclass(frozen=True, slots=True)
class CascadeDepths:
    """The output of ``topology show``. ``queues``: depths of the queues around the cascade; None for a missing queue.
    ``hidden``: queues that the broker does not show to this user, also with a depth of None. ``delayed``: by level and
    queue, the messages that the broker itself delays or is forwarding, which depths do not include; None if unknown.
    Without zeros for a broker that does not delay messages."""

    kind: str
    delivery: str
    levels: tuple[LevelState, ...]
    queues: dict[str, int | None]
    hidden: tuple[str, ...] = ()
    delayed: dict[str, int | None] = field(default_factory=dict)


async def cascade_depths(
    url: str,
    name: str,
    cascade: Cascade,
    queues: Iterable[str],
    *,
    patience: float = PATIENCE,
    management_url: str | None = None,
) -> CascadeDepths:
    """Read the depths of all levels, of ``queues`` and of the strays queue.

    A cascade without its first and last level counts as missing, because the broker logs each request for a missing
    queue. Queues without permission are hidden. In store mode the daemon has no rights in the cascade, and RabbitMQ 4.3
    hides it. ``name``: the connection's. Raises BrokerLost, and BrokerRefused if all queues are hidden.
    """
    wanted = list(queues)
    first, last = cascade.level(LEVELS - 1), cascade.level(0)
    around = [*wanted, *([cascade.strays] if cascade.strays else [])]
    every = [*(level.name for level in cascade.levels()), *around]
    inner = [level.name for level in cascade.levels() if level.name not in (first, last)]
    async with pipelined_admin(url, name, patience=patience) as broker:
        answers = await broker.depths(name for name in every if name not in inner)
        if all(_forbidden(one) for one in answers.values()):
            raise BrokerRefused(str(answers[first]))
        there = isinstance(answers[first], int) or isinstance(answers[last], int)
        answers |= await broker.depths(inner) if there else dict.fromkeys(inner, answers[first])
        delays = broker.may_delay
    delayed: dict[str, int | None] = {}
    if delays or (there and management_url is not None):
        from delayer.broker.management_api import Management, delayed_in  # noqa: PLC0415 - urllib takes 12 ms to load

        management = Management.beside(url, management_url)
        delayed = await delayed_in(every, management)
        if management is not None and None not in delayed.values():
            try:  # AMQP counts no messages in a queue whose members are down.
                delayed |= {name: None for name, one in (await management.members(every)).items() if one.minority}
            except (BrokerRefused, BrokerLost):
                delayed = dict.fromkeys(every)
        delayed = delayed if delays else {name: count for name, count in delayed.items() if count != 0}
    hidden = [name for name in every if _forbidden(answers[name])]
    depths = {name: None if isinstance(one, ChannelClosed) else one for name, one in answers.items()}
    levels = (LevelState(one.number, one.name, one.ttl_ms, depths[one.name]) for one in cascade.levels())
    queues_around = {name: depths[name] for name in around}
    return CascadeDepths(cascade.kind, cascade.delivery, tuple(levels), queues_around, tuple(hidden), delayed)


def _forbidden(answer: int | ChannelClosed) -> bool:
    return isinstance(answer, ChannelClosed) and answer.code == ReplyCode.ACCESS_REFUSED
