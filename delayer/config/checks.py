"""Checks of the settings that no single table can make: names that collide, and addresses as a whole.

The checks of names read raw values, so that they find mistakes beside those of the tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from delayer.amqp.address import Address
from delayer.config.errors import Expected, Problem, show
from delayer.config.model import Intake, Native, Refused, Settings
from delayer.config.sources import Merged
from delayer.config.values import duration_ms, duration_text
from delayer.core.cascade import KINDS, Cascade

Routes = Sequence[Mapping[str, Any]]
Mistake = tuple[str, str, str, str]
"""The source ("" for that of the key), the key, expected, found."""

_QUEUES = {"intake.queue": Intake().queue, "native.due_queue": Native().due_queue, "refused.queue": Refused().queue}
_NOT_OURS = "a name that is not one of the cascade's"

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
    queues = {key: str(value_at(merged.values, key.split(".")) or name) for key, name in _QUEUES.items()}
    routes = _tables(merged, "route")
    mistakes = [*_same_queue(merged, queues), *_of_routes(routes, queues, merged), *_circles(routes)]
    mistakes += [*_in_the_cascade(routes, queues, merged), *_takeovers(routes, queues, merged, sealed=sealed)]
    return [Problem(source or _origin(merged, key), key, *rest) for source, key, *rest in mistakes]


def _origin(merged: Merged, key: str) -> str:
    return merged.origin(tuple(key.partition("[")[0].split(".")))


def _tables(merged: Merged, name: str) -> list[Mapping[str, Any]]:
    """The tables of a list; an empty one in place of what is no table, which the model reports."""
    found = merged.values.get(name, [])
    return [one if isinstance(one, dict) else {} for one in found] if isinstance(found, list) else []


def _same_queue(merged: Merged, queues: Mapping[str, str]) -> Iterator[Mistake]:
    first: dict[str, str] = {}
    for key, name in queues.items():
        other = first.setdefault(name, key)
        if other != key:
            where = key if value_at(merged.values, key.split(".")) else other
            yield _origin(merged, where), key, f"another queue than {other}", show(name)


def _of_routes(routes: Routes, queues: Mapping[str, str], merged: Merged) -> Iterator[Mistake]:
    seen: dict[str, int] = {}
    refused = queues["refused.queue"]
    for index, route in enumerate(routes):
        at, start = f"route[{index}]", _text(route.get("from"))
        if start is not None and seen.setdefault(start, index) != index:
            yield "", f"{at}.from", f"an exchange that no other route has (route[{seen[start]}])", show(start)
        for end in ("from", "to"):
            if route.get(end) == refused:
                yield "", f"{at}.{end}", "another name than refused.queue, whose exchange takes it", show(refused)
        key = route.get("routing_key")
        if not route.get("to", "") and key == queues["intake.queue"]:
            yield "", f"{at}.routing_key", "a queue other than the intake queue", show(key)
        with suppress(Expected):  # the tables report it
            longest_ms = duration_ms(value_at(merged.values, ("intake", "max_delay")) or "3650d")
            if duration_ms(route.get("default_delay", "0s")) > longest_ms:
                limit = f"at most intake.max_delay, {duration_text(longest_ms)}"
                yield "", f"{at}.default_delay", limit, show(route["default_delay"])
        # The daemon consumes these queues, or puts other messages into them.
        exhausted = value_at(route, ("retry", "exhausted"))
        for taken in [name for name, queue in queues.items() if queue == exhausted][:1]:
            yield "", f"{at}.retry.exhausted", f"another queue than {taken}", show(exhausted)


def _circles(routes: Routes) -> Iterator[Mistake]:
    """Routes that lead back to their own exchange: a message that is due at once would go round for ever."""
    leads = {_text(route.get("from")): _text(route.get("to")) for route in routes if route.get("to")}
    for index, route in enumerate(routes):
        start = _text(route.get("from"))
        path, at = [start], leads.get(start)
        while at in leads and at not in path:
            path.append(at)
            at = leads[at]
        if start is not None and at == start and len(path) > 1:
            way = " to ".join(map(show, [*path, start]))
            yield "", f"route[{index}].to", f"an exchange that does not lead back here ({way})", show(leads[start])


def _in_the_cascade(routes: Routes, queues: Mapping[str, str], merged: Merged) -> Iterator[Mistake]:
    """Queues, exchanges and destinations with names of the cascade: messages would get into the middle of it."""
    try:
        cascade = Cascade(prefix=value_at(merged.values, ("native", "prefix")) or "delayer.")  # type: ignore[arg-type]
    except (TypeError, ValueError, AttributeError):
        return  # the table reports it
    taken = {level.name for level in cascade.levels()} | {cascade.delivery, cascade.strays}
    named = list(queues.items())
    for index, route in enumerate(routes):
        named += [(f"route[{index}].{end}", _text(route.get(end)) or "") for end in ("from", "to")]
        key = _text(route.get("routing_key"))
        if not route.get("to") and key in taken | {queues["native.due_queue"]}:
            yield "", f"route[{index}].routing_key", _NOT_OURS, show(key)
    yield from (("", key, _NOT_OURS, show(name)) for key, name in named if name in taken)


def _takeovers(routes: Routes, queues: Mapping[str, str], merged: Merged, *, sealed: bool) -> Iterator[Mistake]:
    """Takeovers that stand twice or have no store, and our names that are names of a cascade of another system."""
    tables, native = _tables(merged, "takeover"), merged.values.get("mode") == "native"
    if tables and native and not sealed and not value_at(merged.values, ("store", "url")):
        yield "", "takeover", "a store for what is taken over: store.url, where the mode is native", "none"
    ours = dict(queues) | {f"route[{index}].from": str(route.get("from")) for index, route in enumerate(routes)}
    seen: set[Cascade] = set()
    for index, one in enumerate(tables):
        kind = _text(one.get("cascade"))
        try:
            cascade = Cascade(kind if kind in KINDS else "delayer", owner=_text(one.get("prefix")) or "")
        except ValueError:
            continue  # the table reports it
        if cascade.kind == "delayer":
            continue  # as above
        if cascade in seen:
            yield "", f"takeover[{index}].cascade", "a cascade that no other takeover has", show(kind)
            continue
        seen.add(cascade)
        taken = {level.name for level in cascade.levels()} | {cascade.delivery}
        expected = f"a name that is not one of cascade {kind}'s, which is its owner's"
        yield from (("", key, expected, show(name)) for key, name in ours.items() if name in taken)


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
