"""Names that must not meet: routes in a circle, and things that bear a name of the cascade."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from delayer.core.cascade import Cascade
from delayer.settings.errors import Problem, show
from delayer.settings.layers import Merged

Routes = Sequence[Mapping[str, Any]]


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


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
