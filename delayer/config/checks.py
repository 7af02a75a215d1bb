"""Checks of the settings that no single table can make: names that collide, and addresses as a whole.

The checks of names read raw values, so that they find mistakes beside those of the tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from delayer.amqp.address import Address
from delayer.config.errors import Expected, Problem, show
from delayer.config.model import Native, Refused, Settings
from delayer.config.sources import Merged
from delayer.config.values import duration_ms, duration_text
from delayer.core.cascade import KINDS, Cascade

Routes = Sequence[Mapping[str, Any]]
SHARED = {kind: kind for kind in KINDS if kind != "delayer"}

_SSL_MODES = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
_VERIFIED = ("verify-ca", "verify-full")
_ONE_OF = {
    "sslmode": _SSL_MODES,
    "target_session_attrs": ("any", "primary", "standby", "prefer-standby", "read-write", "read-only"),
    "sslnegotiation": ("postgres", "direct"),
    "ssl_min_protocol_version": ("TLSv1", "TLSv1.1", "TLSv1.2", "TLSv1.3"),
    "ssl_max_protocol_version": ("TLSv1", "TLSv1.1", "TLSv1.2", "TLSv1.3"),
}
_OUR_FILES, _THEIR_FILES = ("sslcert", "sslkey"), ("sslrootcert", "sslcrl")
_OWN_ROOT = ".postgresql/root.crt"


def between_keys(merged: Merged, *, sealed: bool) -> list[Problem]:
    """Names that collide between the tables. ``sealed``: some credentials are left out, perhaps the store's URL."""
    problems: list[Problem] = []
    queues = {("intake", "queue"): str(value_at(merged.values, ("intake", "queue")) or "delays")}
    for key, default in ((("native", "due_queue"), Native().due_queue), (("refused", "queue"), Refused().queue)):
        name = value_at(merged.values, key) or default
        other = next((one for one, taken in queues.items() if taken == name), None)
        if other is not None:
            where = merged.origin(key) if value_at(merged.values, key) else merged.origin(other)
            problems.append(Problem(where, ".".join(key), f"another queue than {'.'.join(other)}", show(name)))
        queues[key] = str(name)
    routes = merged.values.get("route", [])
    seen: dict[object, int] = {}
    for index, route in enumerate(routes if isinstance(routes, list) else []):
        if isinstance(route, dict):
            problems += _route_problems(merged, index, route, seen, queues)
    tables = [route if isinstance(route, dict) else {} for route in routes] if isinstance(routes, list) else []
    problems += circles(tables, merged.origin(("route",))) + into_the_cascade(merged, queues, tables)
    return problems + exhausted_elsewhere(merged, queues, tables) + takeovers(merged, queues, tables, sealed=sealed)


def _route_problems(
    merged: Merged, index: int, route: Mapping[str, Any], seen: dict[object, int], queues: Mapping[tuple[str, str], str]
) -> list[Problem]:
    source, at, problems = merged.origin(("route",)), f"route[{index}]", []
    start = route.get("from")
    if isinstance(start, str) and seen.setdefault(start, index) != index:
        problems.append(
            Problem(source, f"{at}.from", f"an exchange that no other route has (route[{seen[start]}])", show(start))
        )
    refused = queues["refused", "queue"]
    problems += [
        Problem(source, f"{at}.{end}", "another name than refused.queue, whose exchange takes it", show(refused))
        for end in ("from", "to")
        if route.get(end) == refused
    ]
    if not route.get("to", "") and route.get("routing_key") == queues["intake", "queue"]:
        problems.append(
            Problem(source, f"{at}.routing_key", "a queue other than the intake queue", show(route["routing_key"]))
        )
    try:
        longest_ms = duration_ms(value_at(merged.values, ("intake", "max_delay")) or "3650d")
        too_long = duration_ms(route.get("default_delay", "0s")) > longest_ms
    except Expected:
        return problems  # the tables report it
    if too_long:
        limit = f"at most intake.max_delay, {duration_text(longest_ms)}"
        problems.append(Problem(source, f"{at}.default_delay", limit, show(route["default_delay"])))
    return problems


def circles(routes: Routes, source: str) -> list[Problem]:
    """Routes that lead back to their own exchange: a message that is due at once would go round for ever."""
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
    """Queues, exchanges and destinations with names of the cascade: messages would get into the middle of it."""
    native = merged.values.get("native")
    native = native if isinstance(native, dict) else {}
    try:
        cascade = Cascade(prefix=native.get("prefix", "delayer."))
    except (TypeError, ValueError, AttributeError):
        return []  # the table reports it
    taken = {level.name for level in cascade.levels()} | {cascade.delivery, cascade.strays}
    expected = "a name that is not one of the cascade's"
    problems = [
        Problem(merged.origin(key), ".".join(key), expected, show(name))
        for key, name in queues.items()
        if name in taken
    ]
    source = merged.origin(("route",))
    ends = taken | {queues["native", "due_queue"]}
    for index, route in enumerate(routes):
        found = {"from": taken, "to": taken}
        found |= {"routing_key": ends} if not route.get("to") else {}
        problems += [
            Problem(source, f"route[{index}].{key}", expected, show(route[key]))
            for key, names in found.items()
            if _text(route.get(key)) in names
        ]
    return problems


def exhausted_elsewhere(merged: Merged, queues: Mapping[tuple[str, str], str], routes: Routes) -> list[Problem]:
    """Exhausted messages in a queue that the daemon consumes, or puts other messages into."""
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


def takeovers(merged: Merged, queues: Mapping[tuple[str, str], str], routes: Routes, *, sealed: bool) -> list[Problem]:
    """Takeovers that stand twice or have no store, and our names that are names of a cascade of another system."""
    tables = merged.values.get("takeover", [])
    tables = [one for one in tables if isinstance(one, dict)] if isinstance(tables, list) else []
    source, problems = merged.origin(("takeover",)), []
    native = merged.values.get("mode") == "native"
    if tables and native and not sealed and not value_at(merged.values, ("store", "url")):
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
            continue  # the table reports it
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


def broker_address(merged: Merged, settings: Settings) -> list[Problem]:
    """Mistakes of the whole broker address: its parameters, certificates and keys."""
    try:
        Address.parse(settings.broker_url)
    except ValueError as error:  # names what was expected, and never shows the URL
        expected, _, found = str(error).removeprefix("broker URL: ").removeprefix("expected ").partition(", found ")
        found = found or show(str(settings.broker.url))
        return [Problem(merged.origin(("broker", "url")), "broker.url", expected, found)]
    return []


def store_address(merged: Merged, settings: Settings, environ: Mapping[str, str]) -> list[Problem]:
    """Mistakes in the parameters of the store's URL. The driver would report them late, as a store out of reach."""
    source = merged.origin(("store", "url"))
    found = [] if settings.store_url is None else mistakes(settings.store_url, environ)
    return [Problem(source, "store.url", *mistake) for mistake in found]


def mistakes(url: str, environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """The mistakes in the parameters of a store's URL: what was expected, and what was found."""
    query = urlsplit(url).query
    if urlsplit(url).netloc.count("@") > 1:  # the driver takes the host to begin behind the first
        return [("a URL in which an @ of user or password is written %40", "another one (not shown)")]
    try:
        given = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
    except ValueError:
        return [("a URL with name=value pairs, joined by &, behind its ?", "something else (not shown)")]
    found = [
        (f"{name} to be {', '.join(values[:-1])} or {values[-1]}", show(given[name]))
        for name, values in _ONE_OF.items()
        if given.get(name) and given[name] not in values
    ]
    mode = given.get("sslmode")
    strict = mode in (*_VERIFIED, "require")
    read = () if mode in ("disable", None) else (*_OUR_FILES, *(_THEIR_FILES if strict else ()))
    for name in read:
        if given.get(name) and (why := _unreadable(Path(given[name]))):
            found.append((f"{name} to be a file that can be read", f"{show(given[name])}: {why}"))
    if mode in _VERIFIED and not (given.get("sslrootcert") or environ.get("PGSSLROOTCERT") or _has_own_root()):
        found.append((f"sslrootcert, who signed the server's certificate, beside sslmode={mode}", "none"))
    return found


def _has_own_root() -> bool:
    try:
        return not _unreadable(Path.home() / _OWN_ROOT)
    except RuntimeError:  # there is no home
        return False


def _unreadable(file: Path) -> str:
    try:
        with file.open("rb"):
            return ""
    except OSError as error:
        return error.strerror or type(error).__name__


def value_at(values: Any, loc: Sequence[str | int]) -> object:
    for part in loc:
        try:
            values = values[part]
        except (KeyError, IndexError, TypeError):
            return None
    return values
