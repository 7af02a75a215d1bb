"""No message is both gone and unconfirmed: what broker or store confirmed to the ledger is in one of them until it has
arrived."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tests.simulation.broker.message import Message
from tests.simulation.broker.vhost import VirtualHost
from tests.simulation.store.process import Locked
from tests.simulation.world import World
from tests.support.letters import NUMBER

EACH_SECONDS: Final = 10
"""Between two looks. What is gone stays away, so each look finds all that is gone."""
_BODIES: Final = (
    "SELECT encode(substring(body FOR 8), 'hex') FROM (SELECT body FROM message UNION ALL SELECT body FROM held"
    " UNION ALL SELECT body FROM delayer_inbox) AS one WHERE length(body) >= 8"
)
_LOCK: Final = "BEGIN; LOCK TABLE message, held IN ACCESS SHARE MODE NOWAIT"


class Whereabouts:
    def __init__(self, world: World, *, has_store: bool) -> None:
        self._world = world
        self._has_store = has_store
        self._owed: set[int] = set()
        """Numbers of messages that were confirmed, and had not arrived at the last look."""
        self._confirmed = 0

    def check(self) -> None:
        """Nothing else runs meanwhile. Raises AssertionError."""
        ledger = self._world.ledger
        if not ledger._turn.locked():  # nothing is being published
            self._owed.update(range(self._confirmed, ledger.account.sent))
            self._confirmed = ledger.account.sent
        self._owed = {number for number in self._owed if not ledger.account.arrivals_of(number)}
        gone = self._owed - set(_numbers_in(self._world.broker.vhosts["/"]))
        if gone and self._has_store:
            try:
                rows = self._world.store.watch.query(f"{_LOCK}; {_BODIES}; ROLLBACK")
                gone -= {int(body or "", 16) for [body] in rows}
            except Locked:  # partitions are being attached
                self._world.store.watch.query("ROLLBACK")
                return
        assert not gone, f"{len(gone)} were confirmed, and are nowhere: {sorted(gone)[:5]}"


def _numbers_in(vhost: VirtualHost) -> Iterator[int]:
    for message in _messages_in(vhost):
        if len(message.body) >= NUMBER.size:
            yield NUMBER.unpack_from(message.body)[0]


def _messages_in(vhost: VirtualHost) -> Iterator[Message]:
    """Ready, delivered and not settled, and on their way as dead letters."""
    for queue in vhost.queues.values():
        for entries in (queue.ready, queue.returned, *(one.unacked.values() for one in queue.consumers)):
            yield from (entry.message for entry in entries)
        letters = vhost.dead_letters(queue)
        yield from (message for message, _ in (*letters.waiting, *letters.flying.values()))
