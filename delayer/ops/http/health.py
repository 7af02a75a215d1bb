"""What counts as alive, and as ready. Pure: states in, reasons out."""

from __future__ import annotations

from collections.abc import Sequence

from delayer.ops.http.ports import State
from delayer.store.status import StoreOverview


def not_alive(state: State) -> list[str]:
    """Why this process should be killed and started again; empty: it should not."""
    return [f"loop {loop!r} stands still" for loop in state["stalled"]]


def not_ready(states: Sequence[State | None], intake: str, store: StoreOverview | None, error: str) -> list[str]:
    """Why the service does not do its work just now; empty: it does. Its work is that messages go in and come out.

    ``states``: of every worker, None of one that does not answer. ``intake``: the queue that all consume; some consume
    others too. ``store`` is
    what was seen of it, None if it was not reached, for the reason ``error``.
    """
    several = len(states) > 1
    found: list[str] = []
    for number, state in enumerate(states, 1):
        who = f"worker {number}: " if several else ""
        if state is None:
            found.append(f"{who}no answer")
            continue
        consumed = {intake: False} | state["consuming"]
        found += [f"{who}queue {queue!r} is not consumed" for queue, is_ in consumed.items() if not is_]
        publishing = state["connections"]["publish"]
        if not publishing["connected"]:
            found.append(f"{who}nothing is delivered: no connection to publish by")
        elif publishing["blocked"]:
            found.append(f"{who}nothing is delivered: the broker takes no publishes (a resource alarm)")
        if state["mode"] == "store" and not state["usable"]:
            found.append(f"{who}no lane of the store is owned")
        found += [f"{who}{reason}" for reason in not_alive(state)]
    if any(state is not None and state["mode"] == "store" for state in states):
        if store is None:
            found.append(f"the store is out of reach: {error or 'it was not looked at yet'}")
        elif store.upgrade_pending:
            found.append(f"the store's schema is {store.schema_found or 'missing'}, expected {store.schema_expected}")
    return found
