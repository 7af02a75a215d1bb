"""Names that must not meet: routes in a circle, and things that bear a name of the cascade."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from delayer.core.cascade import KINDS, Cascade
from delayer.settings.errors import Problem, show
from delayer.settings.layers import Merged

Routes = Sequence[Mapping[str, Any]]
SHARED = {kind: kind for kind in KINDS if kind != "delayer"}


def circles(routes: Routes, source: str) -> list[Problem]:
    """Routes that lead back to where they began: a message that is due at once would go round for ever."""
    leads = {_text(route.get("from")): _text(route.get("to")) for route in routes if route.get("to")}
    problems = []
    for index, route in enumerate(routes):
        start = _text(route.get("from"))
        path, at = [start], leads.get(start)
        while at in leads and at not in path:
            path.append(at)
            at = leads[at]
        if start is not None and at == start and len(path) > 1:
            way = " to ".join(map(show, [*path, start]))
            expected = f"an exchange that does not lead back here ({way})"
            problems.append(Problem(source, f"route[{index}].to", expected, show(leads[start])))
    return problems


def into_the_cascade(merged: Merged, queues: Mapping[tuple[str, str], str], routes: Routes) -> list[Problem]:
    """Queues, exchanges and destinations that are the cascade's own: messages would be declared into, or published
    into, the middle of it."""
    native = merged.values.get("native", {})
    native = native if isinstance(native, dict) else {}
    try:
        cascade = Cascade(native.get("cascade", "delayer"), native.get("prefix", "delayer."))
    except (TypeError, ValueError, AttributeError):
        return []  # said already, by the table
    taken = {level.name for level in cascade.levels()} | {cascade.delivery}
    taken |= {cascade.strays} if cascade.strays else set()
    expected = "a name that is not one of the cascade's"
    problems = [
        Problem(merged.origin(key), ".".join(key), expected, show(name))
        for key, name in queues.items()
        if name in taken
    ]
    source = merged.origin(("route",))
    ends = taken | {queues["native", "due_queue"]}
    for index, route in enumerate(routes):
        # A shared cascade is somebody else's, and delivering into it may be what somebody wants.
        found = {"from": taken, "to": set() if cascade.shared else taken}
        found |= {"routing_key": ends} if not route.get("to") else {}
        problems += [
            Problem(source, f"route[{index}].{key}", expected, show(route[key]))
            for key, names in found.items()
            if _text(route.get(key)) in names
        ]
    return problems


def exhausted_elsewhere(merged: Merged, queues: Mapping[tuple[str, str], str], routes: Routes) -> list[Problem]:
    """Exhausted messages in a queue that the daemon empties, or fills with something else."""
    problems = []
    for index, route in enumerate(routes):
        retry = route.get("retry")
        name = _text(retry.get("exhausted")) if isinstance(retry, dict) else None
        taken = next((".".join(key) for key, queue in queues.items() if queue == name), None)
        if taken is not None:
            source = merged.origin(("route",))
            problems.append(
                Problem(source, f"route[{index}].retry.exhausted", f"another queue than {taken}", show(name))
            )
    return problems


def takeovers(merged: Merged, queues: Mapping[tuple[str, str], str], routes: Routes) -> list[Problem]:
    """Takeovers twice, or without a store; and names of ours that would be declared into somebody else's cascade."""
    tables = merged.values.get("takeover", [])
    tables = [one for one in tables if isinstance(one, dict)] if isinstance(tables, list) else []
    source, problems = merged.origin(("takeover",)), []
    if tables and merged.values.get("mode") == "native" and "url" not in (merged.values.get("store") or {}):
        expected = "a store for what is taken over: store.url, where the mode is native"
        problems.append(Problem(source, "takeover", expected, "none"))
    seen: set[Cascade] = set()
    for index, one in enumerate(tables):
        kind = _text(one.get("cascade"))
        if kind is None or kind not in SHARED:
            continue
        try:
            cascade = Cascade(SHARED[kind], owner=_text(one.get("prefix")) or "")
        except ValueError:
            continue  # said already, by the table
        if cascade in seen:
            problems.append(
                Problem(source, f"takeover[{index}].cascade", "a cascade that no other takeover has", show(kind))
            )
            continue
        seen.add(cascade)
        taken = {level.name for level in cascade.levels()} | {cascade.delivery}
        expected = f"a name that is not one of cascade {kind}'s, which is its owner's"
        ours = {".".join(key): name for key, name in queues.items()}
        ours |= {f"route[{number}].from": str(route.get("from")) for number, route in enumerate(routes)}
        problems += [Problem(source, key, expected, show(name)) for key, name in ours.items() if name in taken]
    return problems


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
