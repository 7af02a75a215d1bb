"""Health: whether the process is alive, and whether it is ready. Pure."""

from __future__ import annotations

from delayer.ops.http.ports import State
from delayer.store.status import StoreOverview


def not_alive(state: State) -> list[str]:
    """Why this process should be killed and started again; empty: it should not."""
    return [f"loop {loop!r} stands still" for loop in state["stalled"]]


def not_ready(state: State, intake: str, store: StoreOverview | None, error: str) -> list[str]:
    """Why the daemon does not do its work just now; empty: messages go in and come out.

    ``intake``: the queue that is always consumed; ``state`` names the others that are. ``store`` is the last look at
    the store, None if the store was out of reach, for the reason ``error``.
    """
    consumed = {intake: False} | state["consuming"]
    found = [f"queue {queue!r} is not consumed" for queue, is_ in consumed.items() if not is_]
    publishing = state["connections"]["publish"]
    if not publishing["connected"]:
        found.append("nothing is delivered: no connection to publish by")
    elif publishing["blocked"]:
        found.append("nothing is delivered: the broker takes no publishes (a resource alarm)")
    if state["mode"] == "store" and not state["usable"]:
        found.append("no lane of the store is owned")
    found += not_alive(state)
    if state["mode"] == "store":
        if store is None:
            found.append(f"the store is out of reach: {error or 'it was not looked at yet'}")
        elif store.upgrade_pending:
            found.append(f"the store's schema is {store.schema_found or 'missing'}, expected {store.schema_expected}")
    return found
