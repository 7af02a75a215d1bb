"""Where values come from: defaults < the TOML file < the environment < flags.

The layers are merged as raw mappings, each value keeping its origin, before anything is typed: a layer that sets one
key of a table then never loses the others. A list (the routes) is replaced as a whole.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, get_origin

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from delayer.settings.errors import Problem
from delayer.settings.model import Settings

Key = tuple[str, ...]
Origin = Callable[[Key], str]

ENV_PREFIX = "DELAYER_"
NOT_KEYS = frozenset(
    {
        "DELAYER_CONFIG", "DELAYER_FAULT", "DELAYER_IMPORT_URL", "DELAYER_IMPORT_MANAGEMENT_URL",
    }
)  # fmt: skip
# Kubernetes puts these into every container of a namespace that has a service called "delayer".
_KUBERNETES = re.compile(r"DELAYER_(SERVICE_HOST|SERVICE_PORT\w*|PORT|PORT_[0-9]+_\w+)")
FLAGS = {"mode": "--mode", "broker.url": "--broker-url", "store.url": "--store-url"}


DEEPEST: Final = 32
"""Tables and arrays inside each other: far more than any key of ours has."""


def _section(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def keys_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The keys of one table, as the file spells them."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def known_keys() -> dict[Key, FieldInfo]:
    """Every key that environment and flags can set, sections included; the routes are one key."""
    known: dict[Key, FieldInfo] = {}
    for name, field in keys_of(Settings).items():
        known[(name,)] = field
        section = _section(field)
        if section is not None:
            known |= {(name, inner): inner_field for inner, inner_field in keys_of(section).items()}
    return known


def env_name(key: Key) -> str:
    return ENV_PREFIX + "__".join(key).upper()


class Merged:
    """The layers laid so far: ``values`` as one raw mapping, and for every value the layer that it came from."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.problems: list[Problem] = []
        self._origins: dict[Key, str] = {}

    def origin(self, key: Key) -> str:
        """Where the value at ``key`` was set; for a value inside a list, where the list was."""
        for length in range(len(key), 0, -1):
            if key[:length] in self._origins:
                return self._origins[key[:length]]
        return "defaults"

    def lay(self, values: Mapping[str, Any], origin: Origin) -> None:
        """Put one layer on top."""
        self._lay(self.values, values, origin, ())

    def put(self, section: str, name: str, value: object, origin: str) -> None:
        """Set one value in a section that exists."""
        self.values[section][name] = value
        self._origins[section, name] = origin

    def _lay(self, under: dict[str, Any], values: Mapping[str, Any], origin: Origin, at: Key) -> None:
        for one, other in (
            ("url", "url_file"), ("url_file", "url"), ("token", "token_file"), ("token_file", "token"),
        ):  # fmt: skip
            if one in values and other in values:
                if one.endswith("_file"):
                    dotted = ".".join((*at, one))
                    self.problems.append(Problem(origin((*at, one)), dotted, f"either {other} or {one}", "both"))
            elif one in values:
                under.pop(other, None)  # of a lower layer: a URL on the command line beats a file in the file
        for name, value in values.items():
            key = (*at, name)
            if isinstance(value, dict):
                if not isinstance(under.get(name), dict):
                    under[name] = {}
                self._origins.setdefault(key, origin(key))
                self._lay(under[name], value, origin, key)
            else:
                under[name] = value
                self._origins[key] = origin(key)


def read_file(path: Path, problems: list[Problem]) -> dict[str, Any]:
    """The mapping in a TOML file; what cannot be read is a problem, and an empty mapping."""
    try:
        values = tomllib.loads(path.read_text("utf-8"))
        if not _deeper(values, DEEPEST):
            return values
        problems.append(Problem(str(path), "", f"values inside values {DEEPEST} deep at most", "deeper ones"))
    except tomllib.TOMLDecodeError as error:
        # "Expected '=' after a key in a key/value pair (at line 3, column 5)", or "… (at end of document)".
        what, _, where = str(error).rpartition(" (at ")
        line = re.match(r"line ([0-9]+)", where)
        place = f"{path}, line {line[1]}" if line else f"{path}, end"
        problems.append(Problem(place, "", "TOML", f"a syntax error: {what or where}"))
    except UnicodeDecodeError as error:
        problems.append(Problem(str(path), "", "TOML in UTF-8", f"other bytes from position {error.start} on"))
    except RecursionError:  # thousands of brackets: no configuration, but nobody knows what is in a file
        problems.append(Problem(str(path), "", f"values inside values {DEEPEST} deep at most", "deeper ones"))
    except ValueError as error:  # a number of thousands of digits, which TOML allows, and Python does not convert
        problems.append(Problem(str(path), "", "TOML that can be read", str(error).partition(":")[0]))
    except OSError as error:
        problems.append(Problem(str(path), "", "a readable configuration file", error.strerror or str(error)))
    return {}


def _deeper(values: dict[str, Any], most: int) -> bool:
    """Whether there are values inside values for more than ``most`` times. Reads them level by level: what is too deep
    to be read by calls inside calls is what this is for."""
    level: list[Any] = [values]
    for _ in range(most):
        level = [
            inner
            for value in level
            if isinstance(value, dict | list)
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
    return any(isinstance(value, dict | list) for value in level)


def environment(environ: Mapping[str, str], problems: list[Problem]) -> tuple[dict[str, Any], Origin]:
    """The layer of the ``DELAYER_…`` variables."""
    names = {env_name(key): key for key in known_keys()}
    entries: list[tuple[Key, str, str]] = []
    for name in sorted(environ):
        if not name.startswith(ENV_PREFIX) or name in NOT_KEYS or _KUBERNETES.fullmatch(name):
            continue
        source = f"environment variable {name}"
        if name in names:
            entries.append((names[name], environ[name], source))
        else:
            into_route = name.startswith("DELAYER_ROUTE_")
            hint = "routes are set together: DELAYER_ROUTE='[{…}]'" if into_route else ""
            problems.append(unknown_key(source, "", name, () if into_route else names, hint))
    return _texts(entries, problems)


def flags(given: Mapping[str, str], problems: list[Problem]) -> tuple[dict[str, Any], Origin]:
    """The layer of the command line: dotted key to text."""
    names = {".".join(key): key for key in known_keys()}
    entries: list[tuple[Key, str, str]] = []
    for name, text in given.items():
        source = f"flag {FLAGS.get(name, '--set')}"
        if name in names:
            entries.append((names[name], text, source))
        else:
            problems.append(unknown_key("flag --set", name, name, names))
    return _texts(entries, problems)


def unknown_key(source: str, key: str, name: str, candidates: Iterable[str], hint: str = "") -> Problem:
    """A key that nobody knows. Its value is never shown: it might be a password under a wrong name."""
    near = difflib.get_close_matches(name, list(candidates), n=1)
    return Problem(source, key, "a known key", "an unknown one", f"did you mean {near[0]}?" if near else hint)


def _texts(entries: list[tuple[Key, str, str]], problems: list[Problem]) -> tuple[dict[str, Any], Origin]:
    """A layer out of texts. Sections go first, so that a variable for one key beats a variable for its whole table."""
    layer: dict[str, Any] = {}
    sources: dict[Key, str] = {}
    known = known_keys()
    for key, text, source in sorted(entries):
        value = _read_text(known[key], text)
        if value is None:
            kind = "table" if _section(known[key]) else "list"
            problems.append(Problem(source, ".".join(key), f"a JSON {kind}", "something else"))
            continue
        table = layer
        for name in key[:-1]:
            table = table.setdefault(name, {})
        table[key[-1]] = value
        sources[key] = source
    return layer, lambda key: sources.get(key) or sources.get(key[:1]) or ""


def _read_text(field: FieldInfo, text: str) -> object:
    """``text`` as the raw value that the file would hold; None where a list or a table was needed and there is none."""
    section = _section(field)
    if section is not None or get_origin(field.annotation) is tuple:
        try:
            value: object = json.loads(text)
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, dict if section else list) else None
    parsed_by_us = any(isinstance(rule, BeforeValidator) for rule in field.metadata)
    if field.annotation in (int, bool) and not parsed_by_us:
        try:
            return json.loads(text.strip().lower())
        except ValueError:
            return text  # the model says what it expected, and finds this
    return text
