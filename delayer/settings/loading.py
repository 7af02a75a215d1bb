"""From files, environment and flags to one :class:`Settings`, or to the list of everything that is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from delayer.settings import layers, store_address
from delayer.settings.collisions import circles, exhausted_elsewhere, into_the_cascade, takeovers
from delayer.settings.errors import ConfigError, Expected, Problem, show
from delayer.settings.layers import Key, Merged
from delayer.settings.model import Destination, Native, Refused, Retry, Route, Settings, Takeover
from delayer.settings.values import duration_ms, duration_text
from delayer.wire.address import Address

SYSTEM_FILE = Path("/etc/delayer/delayer.toml")
_FILES = ("url_file", "ca_file", "cert_file", "key_file", "token_file")
_CONTENTS = {"url_file": "url", "token_file": "token"}
"""What stands in the file, for those of which the content is a value of its own."""
_CREDENTIALS = "${CREDENTIALS_DIRECTORY}"
_CREDENTIALS_HINT = (
    "LoadCredential= in the unit sets it for the daemon; in a shell: "
    "sudo CREDENTIALS_DIRECTORY=/etc/delayer delayer check"
)

# Tables in lists, and in tables of lists, by the last part of their place.
_TABLES_WITHIN: Mapping[str, type[BaseModel]] = {
    "route": Route,
    "retry": Retry,
    "takeover": Takeover,
    "destination": Destination,
}
_EXPECTED = {
    "missing": "a value",
    "int_type": "a whole number",
    "bool_type": "true or false",
    "model_type": "a table",
    "tuple_type": "a list",
}


def config_file(config: Path | None, environ: Mapping[str, str]) -> Path | None:
    """The file to read: ``config`` (--config), else ``DELAYER_CONFIG``, else /etc/delayer/delayer.toml if there is one.

    None: the defaults, the environment and the flags are all there is.
    """
    if config is not None:
        return config
    if environ.get("DELAYER_CONFIG"):
        return Path(environ["DELAYER_CONFIG"])
    try:
        return SYSTEM_FILE if SYSTEM_FILE.exists() else None
    except PermissionError:
        return SYSTEM_FILE  # in a directory that is closed to us: reading it says so


def load(
    config: Path | None, environ: Mapping[str, str], flags: Mapping[str, str], sealed: list[str] | None = None
) -> Settings:
    """Read every layer and build the settings. ``flags`` maps dotted keys to texts, as ``--set`` takes them.

    ``sealed`` gets the credentials that we may not read, where that shall be no problem: systemd hands them to the
    daemon, and not to what a unit runs at a reload. What they would have said is left out, and not looked at.

    Raises ConfigError with every problem of every layer.
    """
    merged = Merged()
    path = config_file(config, environ)
    if path is not None:
        merged.lay(layers.read_file(path, merged.problems), lambda key: str(path))
    merged.lay(*layers.environment(environ, merged.problems))
    merged.lay(*layers.flags(flags, merged.problems))
    _read_named_files(merged, environ, sealed)
    problems = merged.problems
    settings = None
    try:
        settings = Settings.model_validate(merged.values)
    except ValidationError as error:
        problems += [_problem(merged, one) for one in error.errors(include_url=False, include_input=False)]
    problems += _between_keys(merged)
    if settings is not None and not sealed:
        problems += _store_address(merged, settings, environ)
    if settings is not None and not sealed and not problems:
        problems += _broker_address(merged, settings)
    if problems or settings is None:
        raise ConfigError(problems)
    return settings


def _broker_address(merged: Merged, settings: Settings) -> list[Problem]:
    """What only shows when everything about the broker is put together: its parameters, certificates and keys."""
    try:
        Address.parse(settings.broker_url)
    except ValueError as error:  # names what was expected, and never shows the URL
        expected, _, found = str(error).removeprefix("broker URL: ").removeprefix("expected ").partition(", found ")
        found = found or show(str(settings.broker.url))
        return [Problem(merged.origin(("broker", "url")), "broker.url", expected, found)]
    return []


def _store_address(merged: Merged, settings: Settings, environ: Mapping[str, str]) -> list[Problem]:
    source = merged.origin(("store", "url"))
    found = [] if settings.store_url is None else store_address.mistakes(settings.store_url, environ)
    return [Problem(source, "store.url", *mistake) for mistake in found]


def _read_named_files(merged: Merged, environ: Mapping[str, str], sealed: list[str] | None) -> None:
    """Replace ``${CREDENTIALS_DIRECTORY}`` in the ``…_file`` keys, check that each can be read, and read the URLs and
    the token."""
    for section in ("broker", "store", "http"):
        table = merged.values.get(section)
        if not isinstance(table, dict):
            continue
        for name in _FILES:
            given = table.get(name)
            if not isinstance(given, str):
                continue
            key = (section, name)
            if _CREDENTIALS in given and not environ.get("CREDENTIALS_DIRECTORY"):
                _note(merged, key, "CREDENTIALS_DIRECTORY to be set", show(given), _CREDENTIALS_HINT)
                continue
            table[name] = given.replace(_CREDENTIALS, environ.get("CREDENTIALS_DIRECTORY", ""))
            try:
                content = Path(table[name]).read_text("utf-8")
            except (OSError, ValueError) as error:
                if sealed is not None and isinstance(error, PermissionError) and _CREDENTIALS in given:
                    sealed.append(given)
                    del table[name]
                    continue
                reason = error.strerror if isinstance(error, OSError) else "not text"
                _note(merged, key, "a file that can be read", show(table[name]), str(reason))
                continue
            if name in _CONTENTS and _CONTENTS[name] not in table:
                merged.put(section, _CONTENTS[name], content.strip(), table[name])


def _note(merged: Merged, key: Key, expected: str, found: str, hint: str = "") -> None:
    merged.problems.append(Problem(merged.origin(key), ".".join(key), expected, found, hint))


def _problem(merged: Merged, error: Mapping[str, Any]) -> Problem:
    """One error of pydantic in our words."""
    loc: tuple[str | int, ...] = error["loc"]
    key = tuple(str(part) for part in loc)
    source, dotted = merged.origin(key), _dotted(loc)
    if error["type"] == "extra_forbidden":
        siblings = list(_keys_at(loc[:-1]))
        elsewhere = [".".join(known) for known in layers.known_keys() if known[-1] == loc[-1]]
        hint = f"did you mean {elsewhere[0]}?" if elsewhere else f"known here: {', '.join(siblings)}"
        return layers.unknown_key(source, dotted, str(loc[-1]), siblings, hint)
    found = show(_at(merged.values, loc), is_url=str(loc[-1]).endswith("url"))
    if loc[-1] == "token":
        found = "something else (not shown)"
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, Expected):
        return Problem(source, dotted, str(cause), found)
    if error["type"] == "literal_error":
        return Problem(source, dotted, error["ctx"]["expected"].replace("'", '"'), found)
    if error["type"] in ("greater_than_equal", "less_than_equal"):
        limit = f"at least {error['ctx']['ge']}" if "ge" in error["ctx"] else f"at most {error['ctx']['le']}"
        return Problem(source, dotted, f"a whole number of {limit}", found)
    return Problem(source, dotted, _EXPECTED.get(error["type"], error["msg"]), found)


def _dotted(loc: Sequence[str | int]) -> str:
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _at(values: Any, loc: Sequence[str | int]) -> object:
    for part in loc:
        try:
            values = values[part]
        except (KeyError, IndexError, TypeError):
            return None
    return values


def _keys_at(loc: Sequence[str | int]) -> dict[str, Any]:
    model: type[BaseModel] = Settings
    for part in loc:
        if isinstance(part, str) and part in _TABLES_WITHIN:
            model = _TABLES_WITHIN[part]
        elif isinstance(part, str):
            model = layers.keys_of(model)[part].annotation  # type: ignore[assignment]  # sections only
    return dict(layers.keys_of(model))


def _between_keys(merged: Merged) -> list[Problem]:
    """What no single table can see. Works on raw values, so it finds its mistakes beside those of the tables."""
    problems: list[Problem] = []
    intake = merged.values.get("intake", {})
    intake = intake if isinstance(intake, dict) else {}
    queues: dict[tuple[str, str], str] = {("intake", "queue"): intake.get("queue", "delays")}
    for key, default in ((("native", "due_queue"), Native().due_queue), (("refused", "queue"), Refused().queue)):
        name = _at(merged.values, key) or default
        other = next((one for one, taken in queues.items() if taken == name), None)
        if other is not None:
            where = merged.origin(key) if _at(merged.values, key) else merged.origin(other)
            problems.append(Problem(where, ".".join(key), f"another queue than {'.'.join(other)}", show(name)))
        queues[key] = str(name)
    routes = merged.values.get("route", [])
    seen: dict[object, int] = {}
    for index, route in enumerate(routes if isinstance(routes, list) else []):
        if isinstance(route, dict):
            problems += _route_problems(merged, index, route, seen, queues)
    tables = [route if isinstance(route, dict) else {} for route in routes] if isinstance(routes, list) else []
    problems += circles(tables, merged.origin(("route",))) + into_the_cascade(merged, queues, tables)
    return problems + exhausted_elsewhere(merged, queues, tables) + takeovers(merged, queues, tables)


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
        longest_ms = duration_ms(_at(merged.values, ("intake", "max_delay")) or "3650d")
        too_long = duration_ms(route.get("default_delay", "0s")) > longest_ms
    except Expected:
        return problems  # said already, by the tables
    if too_long:
        limit = f"at most intake.max_delay, {duration_text(longest_ms)}"
        problems.append(Problem(source, f"{at}.default_delay", limit, show(route["default_delay"])))
    return problems
