"""The handler of the SQL inbox: the intake's, for deliveries that are rows of the store.

It parks messages, and applies cancels, in the transaction that deletes their rows. Everything else is the same: it
accepts what it publishes after the confirm, and then the row is deleted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from delayer.core.counters import Counters
from delayer.core.operations import Applied, Operation
from delayer.core.plan import Policy
from delayer.intake.dispatch import Dispatch
from delayer.intake.handle import IntakeHandler
from delayer.intake.ports import Inbox, IntakeSettings

NAME: Final = "delayer_inbox"
"""The name of the inbox where queues are named."""
_UNROUTED: Final = (
    "pass one of these as exchange to delayer_send, and give all daemons of this store the same routes; routes with "
    "retry take no message by SQL"
)


class InboxHandler(IntakeHandler):
    """Handles the rows of the SQL inbox."""

    def __init__(self, live: IntakeSettings, dispatch: Dispatch, inbox: Inbox, counters: Counters) -> None:
        super().__init__(live, dispatch, dispatch.backlog, counters)
        self._inbox = inbox
        self._seen = self._adapted = live.policy()

    def _begin_term(self) -> None:
        """Rows of the inbox need no term: if another process has moved a row, the transaction fails."""

    async def _commit(self, operations: Sequence[Operation], tags: Sequence[int]) -> Applied:
        return await self._inbox.move(operations, tags)

    def _policy(self) -> Policy:
        """Return the policy for rows. Routes with ``retry`` are left out: no dead letter comes by SQL, and a forged
        x-death would choose any queue. There is a store, because it has the row, which can wait there."""
        policy = super()._policy()
        if policy is not self._seen or self._adapted is self._seen:
            routes = {source: route for source, route in policy.routes.items() if route.retry is None}
            self._seen = policy
            self._adapted = replace(policy, routes=routes, unrouted=_UNROUTED, has_store=True)
        return self._adapted
