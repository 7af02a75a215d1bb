"""Load the settings from file, environment and flags, or list all errors in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args
from urllib.parse import parse_qsl, urlsplit

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from delayer.amqp.address import Address
from delayer.config.errors import ConfigError, Expected, Problem, format_found
from delayer.config.model import RouteTable, Settings, Table
from delayer.config.sources import (
    MergedSettings,
    keys_of,
    known_keys,
    read_environment,
    read_file,
    read_flags,
    unknown_key,
    value_at,
)
from delayer.config.texts import duration_text
from delayer.config.tokens import parse_tokens
from delayer.config.values import is_port
from delayer.core.cascade import Cascade, parking_queue
from delayer.core.topology import Topology

SYSTEM_FILE = Path("/etc/delayer/delayer.toml")
_FILES = ("url_file", "ca_file", "cert_file", "key_file", "tokens_file")
_CREDENTIALS = "${CREDENTIALS_DIRECTORY}"
_CLOSED = "Permission denied: a daemon needs LoadCredential= in its unit, and a command needs sudo"

_EXPECTED = {
    "missing": "a value",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "model_type": "a table",
    "tuple_type": "a list",
}
_OF_TABLES = "a list of tables: [[…]] in the file, a JSON list of objects elsewhere"
_BOUNDS = {"ge": "at least", "le": "at most"}


def config_file(config: Path | None, environ: Mapping[str, str], system: Path = SYSTEM_FILE) -> Path | None:
    """Choose the file: ``config`` (--config), else ``DELAYER_CONFIG``, else ``system`` if it exists, else None."""
    if config is not None:
        return config
    if environ.get("DELAYER_CONFIG"):
        return Path(environ["DELAYER_CONFIG"])
    try:
        return system if system.exists() else None
    except PermissionError:
        return system  # The directory is closed to us; reading the file reports that.


def load(
    file: Path | None,
    environ: Mapping[str, str],
    flags: Mapping[str, str],
    sealed: list[str] | None = None,
    *,
    tokens: bool = True,
) -> Settings:
    """Read every source and build the settings. ``file`` is from :func:`config_file`. ``flags`` maps dotted keys to
    strings, like ``--set``. Raises ConfigError with every error of every source.

    systemd passes credentials to the daemon, but not to the commands that a unit runs at a reload. ``sealed``, if
    given, collects the credential files that this process may not read; their values stay unchecked. ``tokens``:
    whether to check the file of tokens, which only the daemon's HTTP server reads.
    """
    merged = MergedSettings(read_flags(flags), read_environment(environ), read_file(file))
    directory = environ.get("CREDENTIALS_DIRECTORY") or str((file or SYSTEM_FILE).parent)
    _read_named_files(merged, directory, sealed, tokens=tokens)
    errors: list[ErrorDetails] = []
    try:
        settings: Settings | None = Settings.model_validate(merged.values)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
        merged.problems += [_problem(merged, one) for one in errors]
        settings = _without_mistakes(merged.values, errors)
    if settings is None:
        raise ConfigError(merged.problems)
    merged.problems += between_keys(settings, merged, sealed=bool(sealed))
    if not errors and not sealed:
        for expected, found in store_url_errors(settings.store_url, environ) if settings.store_url else []:
            merged.note(("store", "url"), expected, found)
        try:  # The whole address: its parameters, certificates and keys.
            if not merged.problems:
                Address.parse_all(settings.broker_url)
        except ValueError as error:  # The error names the expected form and never shows the URL.
            expected, _, found = str(error).removeprefix("broker URL: ").removeprefix("expected ").partition(", found ")
            merged.note(("broker", "url"), expected, found or format_found(str(settings.broker.url)))
    if merged.problems:
        raise ConfigError(merged.problems)
    return settings


def _read_named_files(merged: MergedSettings, directory: str, sealed: list[str] | None, *, tokens: bool) -> None:
    """Replace ``${CREDENTIALS_DIRECTORY}`` in the ``…_file`` keys by ``directory``, check that each file is readable,
    read the URLs, and check the tokens."""
    for section in ("broker", "store", "http"):
        table = merged.values.get(section)
        if not isinstance(table, dict):
            continue
        for name in _FILES:
            given = table.get(name)
            if not isinstance(given, str):
                continue
            key = (section, name)
            table[name] = given.replace(_CREDENTIALS, directory)
            if name == "tokens_file" and not tokens:
                continue
            try:
                content = Path(table[name]).read_text("utf-8")
            except (OSError, ValueError) as error:
                closed = isinstance(error, PermissionError) and _CREDENTIALS in given
                if sealed is not None and closed:
                    sealed.append(given)
                    del table[name]
                    continue
                reason = _CLOSED if closed else error.strerror if isinstance(error, OSError) else "not text"
                merged.note(key, "a file that can be read", format_found(table[name]), str(reason))
                continue
            if name == "url_file" and "url" not in table:
                merged.put(section, "url", content.strip(), table[name])
            if name == "tokens_file":
                for line, expected in parse_tokens(content).mistakes:
                    merged.note(key, f"{expected}, in line {line} of {table[name]}", "something else (not shown)")


def _problem(merged: MergedSettings, error: Mapping[str, Any]) -> Problem:
    loc: tuple[str | int, ...] = error["loc"]
    key = tuple(str(part) for part in loc)
    source, dotted = merged.origin(key), _dotted(loc)
    if error["type"] == "extra_forbidden":
        siblings = list(keys_of(_table_at(loc[:-1]) or Settings))
        elsewhere = [".".join(known) for known in known_keys() if known[-1] == loc[-1]]
        hint = f"did you mean {elsewhere[0]}?" if elsewhere else f"known here: {', '.join(siblings)}"
        return unknown_key(source, dotted, str(loc[-1]), siblings, hint)
    found = format_found(value_at(merged.values, loc), is_url=str(loc[-1]).endswith("url"))
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, Expected):
        return Problem(source, dotted, str(cause), found)
    if error["type"] == "literal_error":
        return Problem(source, dotted, error["ctx"]["expected"].replace("'", '"'), found)
    if error["type"] == "tuple_type" and _table_at(loc) is not None:
        return Problem(source, dotted, _OF_TABLES, found)
    if error["type"] in ("greater_than_equal", "less_than_equal"):
        bound, limit = next((word, error["ctx"][name]) for name, word in _BOUNDS.items() if name in error["ctx"])
        kind = "a whole number" if isinstance(limit, int) else "a number"
        return Problem(source, dotted, f"{kind} of {bound} {limit:g}", found)
    return Problem(source, dotted, _EXPECTED.get(error["type"], error["msg"]), found)


def _dotted(loc: Sequence[str | int]) -> str:
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _table_at(loc: Sequence[str | int]) -> type[Table] | None:
    """The table at that place: Settings, a section, or one in a list of tables; None for another value."""
    model: type[Table] | None = Settings
    for part in loc:
        if isinstance(part, str) and model is not None:
            kind = keys_of(model)[part].annotation
            kinds = (kind, *get_args(kind))
            model = next((one for one in kinds if isinstance(one, type) and issubclass(one, Table)), None)
    return model


Mistake = tuple[str, str, str]
"""The key, the expected and the found value."""

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
_OWN_ROOT = Path("~/.postgresql/root.crt")


def _without_mistakes(values: dict[str, Any], errors: Iterable[ErrorDetails]) -> Settings | None:
    """Remove invalid values, so that the checks between keys see the rest; None if the rest is still invalid."""
    for error in errors:
        *path, name = error["loc"]
        table = value_at(values, path)
        if error["loc"][0] == "takeover":  # Without a valid name it has no cascade, so drop all takeovers.
            values.pop("takeover", None)
        elif isinstance(table, dict) and error["type"] == "missing":
            table[name] = _dotted(error["loc"])  # A name that no other key has.
        elif isinstance(table, dict):
            table.pop(name, None)
    with suppress(ValidationError):
        return Settings.model_validate(values)
    return None


def between_keys(settings: Settings, merged: MergedSettings, *, sealed: bool) -> list[Problem]:
    """Check the tables against each other. ``sealed``: some credentials are missing, perhaps the store's URL."""
    queues = {
        "intake.queue": settings.intake.queue,
        "native.due_queue": settings.native.due_queue,
        "refused.queue": settings.refused.queue,
    }
    errors = [*_same_queue(merged, queues), *_of_routes(settings, queues, merged), *_circles(settings.routes)]
    errors += [*_in_the_cascade(settings, queues), *_takeovers(settings, queues)]
    if settings.store_url is None and not sealed:
        keys = ["takeover"] * bool(settings.takeovers)
        keys += [f"route[{index}].key_from" for index, route in enumerate(settings.routes) if route.key_from]
        errors += [(key, "a store for its messages: store.url, where the mode is native", "none") for key in keys]
    if not errors:  # Each of those may be the same mistake, with a better explanation.
        errors += _declared_twice(settings)
    return [Problem(merged.origin(tuple(key.partition("[")[0].split("."))), key, *rest) for key, *rest in errors]


def _same_queue(merged: MergedSettings, queues: Mapping[str, str]) -> Iterator[Mistake]:
    first: dict[str, str] = {}
    for key, name in queues.items():
        other = first.setdefault(name, key)
        if other != key:
            set_, kept = (key, other) if value_at(merged.values, key.split(".")) else (other, key)
            yield set_, f"another queue than {kept}", format_found(name)


def _of_routes(settings: Settings, queues: Mapping[str, str], merged: MergedSettings) -> Iterator[Mistake]:
    seen: dict[str, int] = {}
    refused, longest_ms = queues["refused.queue"], settings.intake.max_delay_ms
    if not settings.routes:
        yield "route", f"one or more routes, {_OF_TABLES}", format_found(settings.routes)
    for index, route in enumerate(settings.routes):
        at = f"route[{index}]"
        if (other := seen.setdefault(route.from_, index)) != index:
            yield f"{at}.from", f"an exchange that no other route has (route[{other}])", format_found(route.from_)
        for end, name in (("from", route.from_), ("to", route.to)):
            if name == refused:
                yield f"{at}.{end}", "another name than refused.queue, whose exchange takes it", format_found(refused)
        if not route.to and route.routing_key == queues["intake.queue"]:
            yield f"{at}.routing_key", "a queue other than the intake queue", format_found(route.routing_key)
        if route.default_delay_ms > longest_ms:
            limit = f"at most intake.max_delay, {duration_text(longest_ms)}"
            yield f"{at}.default_delay", limit, format_found(value_at(merged.values, ("route", index, "default_delay")))
        # The daemon consumes these queues, or puts other messages into them.
        for taken in [name for name, queue in queues.items() if route.retry and queue == route.retry.exhausted][:1]:
            yield f"{at}.retry.exhausted", f"another queue than {taken}", format_found(queues[taken])


def _circles(routes: Sequence[RouteTable]) -> Iterator[Mistake]:
    """Report routes that lead back to their own exchange, because a message due immediately would loop forever."""
    leads = {route.from_: route.to for route in routes if route.to}
    for index, route in enumerate(routes):
        start = route.from_
        path, at = [start], leads.get(start)
        while at in leads and at not in path:
            path.append(at)
            at = leads[at]
        if at == start and len(path) > 1:
            way = " to ".join(map(format_found, [*path, start]))
            yield f"route[{index}].to", f"an exchange that does not lead back here ({way})", format_found(leads[start])


def _in_the_cascade(settings: Settings, queues: Mapping[str, str]) -> Iterator[Mistake]:
    """Report queues, exchanges and destinations named like the cascade's: messages would enter the middle of it."""
    cascade = Cascade(prefix=settings.native.prefix)
    taken = {level.name for level in cascade.levels()} | {cascade.delivery, cascade.strays}
    named = list(queues.items())
    for index, route in enumerate(settings.routes):
        named += [(f"route[{index}].from", route.from_), (f"route[{index}].to", route.to)]
        if not route.to and route.routing_key in taken | {queues["native.due_queue"]}:
            yield f"route[{index}].routing_key", _NOT_OURS, format_found(route.routing_key)
    yield from ((key, _NOT_OURS, format_found(name)) for key, name in named if name in taken)


def _declared_twice(settings: Settings) -> Iterator[Mistake]:
    """Report exchanges and queues that the configuration declares in two ways, in either mode."""
    if not settings.destinations and not any(route.retry for route in settings.routes):
        return
    from delayer.config.topology import destination_of, native_of, sources_of  # noqa: PLC0415 - slow, and rarely needed

    whole = sources_of(settings) + native_of(settings)
    parts = [
        (f"route[{index}].retry.exhausted", Topology(queues=(parking_queue(route.retry.exhausted),)))
        for index, route in enumerate(settings.routes)
        if route.retry is not None
    ]
    parts += [(f"destination[{index}]", destination_of(one)) for index, one in enumerate(settings.destinations)]
    for key, part in parts:
        try:
            whole += part
        except ValueError as twice:
            yield key, "exchanges and queues that nothing else here declares in another way", str(twice)


def _takeovers(settings: Settings, queues: Mapping[str, str]) -> Iterator[Mistake]:
    """Report duplicate takeovers, and names of ours that belong to another system's cascade."""
    ours = dict(queues) | {f"route[{index}].from": route.from_ for index, route in enumerate(settings.routes)}
    seen: set[Cascade] = set()
    for index, one in enumerate(settings.takeovers):
        cascade = Cascade(one.cascade, owner=one.prefix)
        if cascade in seen:
            yield f"takeover[{index}].cascade", "a cascade that no other takeover has", format_found(one.cascade)
            continue
        seen.add(cascade)
        taken = {level.name for level in cascade.levels()} | {cascade.delivery}
        expected = f"a name that is not one of cascade {one.cascade}'s, which is its owner's"
        yield from ((key, expected, format_found(name)) for key, name in ours.items() if name in taken)


def store_url_errors(url: str, environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Check the parameters of a store's URL. Returns expected and found value of each error. The driver reports them
    only when it connects, and then as an unreachable store."""
    query = urlsplit(url).query
    if urlsplit(url).netloc.count("@") > 1:  # For the driver, the host starts after the first @.
        return [("a URL in which an @ of user or password is written %40", "another one (not shown)")]
    try:
        given = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
    except ValueError:
        return [("a URL with name=value pairs, joined by &, behind its ?", "something else (not shown)")]
    found = [
        (f"{name} to be {', '.join(values[:-1])} or {values[-1]}", format_found(given[name]))
        for name, values in _ONE_OF.items()
        if given.get(name) and given[name] not in values
    ]
    if (port := given.get("port")) and not all(map(is_port, port.split(","))):
        found.append(("port to be a number from 1 to 65535", format_found(port)))
    mode = given.get("sslmode")
    strict = mode in (*_VERIFIED, "require")
    read = () if mode in ("disable", None) else (*_OUR_FILES, *(_THEIR_FILES if strict else ()))
    for name in read:
        if given.get(name) and (why := _unreadable(Path(given[name]))):
            found.append((f"{name} to be a file that can be read", f"{format_found(given[name])}: {why}"))
    if mode in _VERIFIED and not (given.get("sslrootcert") or environ.get("PGSSLROOTCERT")) and _unreadable(_OWN_ROOT):
        found.append((f"sslrootcert, who signed the server's certificate, with sslmode={mode}", "none"))
    return found


def _unreadable(file: Path) -> str:
    try:
        with file.expanduser().open("rb"):
            return ""
    except (OSError, RuntimeError) as error:  # The second if the user has no home directory.
        return getattr(error, "strerror", None) or type(error).__name__
