"""The settings, from file, environment and flags; or the list of all mistakes in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from delayer.config import checks
from delayer.config.checks import value_at
from delayer.config.errors import ConfigError, Expected, Problem, show
from delayer.config.model import Destination, Retry, Route, Settings, Takeover
from delayer.config.sources import Environment, File, Flags, Merged, keys_of, known_keys, unknown_key

SYSTEM_FILE = Path("/etc/delayer/delayer.toml")
_FILES = ("url_file", "ca_file", "cert_file", "key_file", "token_file")
_CONTENTS = {"url_file": "url", "token_file": "token"}
"""The keys whose value stands in such a file."""
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
    "float_type": "a number",
    "bool_type": "true or false",
    "model_type": "a table",
    "tuple_type": "a list",
}
_BOUNDS = {"ge": "at least", "le": "at most"}


def config_file(config: Path | None, environ: Mapping[str, str]) -> Path | None:
    """The file to read: ``config`` (--config), else ``DELAYER_CONFIG``, else /etc/delayer/delayer.toml if it exists.

    None: the defaults, the environment and the flags are all there is.
    """
    if config is not None:
        return config
    if environ.get("DELAYER_CONFIG"):
        return Path(environ["DELAYER_CONFIG"])
    try:
        return SYSTEM_FILE if SYSTEM_FILE.exists() else None
    except PermissionError:
        return SYSTEM_FILE  # in a directory that is closed to us: reading it reports that


def load(
    config: Path | None, environ: Mapping[str, str], flags: Mapping[str, str], sealed: list[str] | None = None
) -> Settings:
    """Read every source and build the settings. ``flags`` maps dotted keys to texts, as ``--set`` takes them.

    systemd gives credentials to the daemon, and not to the commands that a unit runs at a reload. If ``sealed`` is
    given, it collects the credential files that this process may not read; their values are left out unchecked.

    Raises ConfigError with every mistake of every source.
    """
    merged = Merged(Flags(flags), Environment(environ), File(config_file(config, environ)))
    _read_named_files(merged, environ, sealed)
    settings = None
    try:
        settings = Settings.model_validate(merged.values)
    except ValidationError as error:
        merged.problems += [_problem(merged, one) for one in error.errors(include_url=False, include_input=False)]
    merged.problems += checks.between_keys(merged, sealed=bool(sealed))
    if settings is not None and not sealed:
        merged.problems += checks.store_address(merged, settings, environ)
        if not merged.problems:
            merged.problems += checks.broker_address(merged, settings)
    if merged.problems or settings is None:
        raise ConfigError(merged.problems)
    return settings


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
                merged.note(key, "CREDENTIALS_DIRECTORY to be set", show(given), _CREDENTIALS_HINT)
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
                merged.note(key, "a file that can be read", show(table[name]), str(reason))
                continue
            if name in _CONTENTS and _CONTENTS[name] not in table:
                merged.put(section, _CONTENTS[name], content.strip(), table[name])


def _problem(merged: Merged, error: Mapping[str, Any]) -> Problem:
    """An error of pydantic as a Problem."""
    loc: tuple[str | int, ...] = error["loc"]
    key = tuple(str(part) for part in loc)
    source, dotted = merged.origin(key), _dotted(loc)
    if error["type"] == "extra_forbidden":
        siblings = list(_keys_at(loc[:-1]))
        elsewhere = [".".join(known) for known in known_keys() if known[-1] == loc[-1]]
        hint = f"did you mean {elsewhere[0]}?" if elsewhere else f"known here: {', '.join(siblings)}"
        return unknown_key(source, dotted, str(loc[-1]), siblings, hint)
    found = show(value_at(merged.values, loc), is_url=str(loc[-1]).endswith("url"))
    if loc[-1] == "token":
        found = "something else (not shown)"
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, Expected):
        return Problem(source, dotted, str(cause), found)
    if error["type"] == "literal_error":
        return Problem(source, dotted, error["ctx"]["expected"].replace("'", '"'), found)
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


def _keys_at(loc: Sequence[str | int]) -> dict[str, Any]:
    model: type[BaseModel] = Settings
    for part in loc:
        if isinstance(part, str) and part in _TABLES_WITHIN:
            model = _TABLES_WITHIN[part]
        elif isinstance(part, str):
            model = keys_of(model)[part].annotation  # type: ignore[assignment]  # sections only
    return dict(keys_of(model))
