"""The sources of the settings: the TOML file, the environment, and the flags of the command line. pydantic-settings
merges their tables key by key, by priority, but replaces a list (the routes) as a whole. Each source keeps its errors,
so that all are reported together."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_origin

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from delayer.config.errors import Problem
from delayer.config.model import Settings
from delayer.core.readable import parser_error

Key = tuple[str, ...]

ENV_PREFIX = "DELAYER_"
NOT_KEYS = frozenset({"DELAYER_CONFIG", "DELAYER_FAULT", "DELAYER_IMPORT_URL", "DELAYER_IMPORT_MANAGEMENT_URL"})
# Kubernetes sets these in every container of a namespace that has a service called "delayer".
_KUBERNETES = re.compile(r"DELAYER_(SERVICE_HOST|SERVICE_PORT\w*|PORT|PORT_[0-9]+_\w+)")
FLAGS = {"mode": "--mode", "broker.url": "--broker-url", "store.url": "--store-url"}
IN_FILES = {"broker": "url", "store": "url"}
"""By section, the key that can also come from a file, whose key is the same name with _file."""


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def keys_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The keys of a table, as the file spells them."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def known_keys() -> dict[Key, FieldInfo]:
    """Every key that environment and flags can set; the routes are one key."""
    known: dict[Key, FieldInfo] = {}
    for name, field in keys_of(Settings).items():
        section = section_of(field)
        inner = {} if section is None else keys_of(section)
        known |= {(name, key): one for key, one in inner.items()} if inner else {(name,): field}
    return known


def env_name(key: Key) -> str:
    return ENV_PREFIX + "__".join(key).upper()


def unknown_key(source: str, key: str, name: str, candidates: Iterable[str], hint: str = "") -> Problem:
    """Report an unknown key, without its value, which may be a password under a wrong name."""
    near = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.7)
    return Problem(source, key, "a known key", "an unknown one", f"did you mean {near[0]}?" if near else hint)


class SettingsSource(PydanticBaseSettingsSource):
    """One source: its raw values, its errors, and ``places``: where it sets a key, or all keys in it, for people."""

    def __init__(self, places: dict[Key, str]) -> None:
        super().__init__(BaseSettings)
        self.places = places
        self.values: dict[str, Any] = {}
        self.problems: list[Problem] = []

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return self.values.get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        """The values, without a URL that a source of higher priority sets directly or by its file."""
        values = dict(self.values)
        for section, name in IN_FILES.items():
            table, above = values.get(section), self.current_state.get(section)
            if not isinstance(table, dict):
                continue
            file = f"{name}_file"
            if name in table and file in table:
                place = self.place((section, file))
                self.problems.append(Problem(place, f"{section}.{file}", f"either {name} or {file}", "both"))
            if isinstance(above, dict) and (name in above or file in above):
                values[section] = {key: value for key, value in table.items() if key not in (name, file)}
        return values

    def place(self, key: Key) -> str:
        return next((self.places[part] for end in range(len(key), -1, -1) if (part := key[:end]) in self.places), "")

    def read_text(self, key: Key, field: FieldInfo, text: str, place: str) -> None:
        """Set a key from a string. Lists of tables are JSON."""
        try:
            value = _read_text(field, text)
        except _NoList as wrong:
            self.problems.append(Problem(place, ".".join(key), "a JSON list", str(wrong)))
            return
        table = self.values if len(key) == 1 else self.values.setdefault(key[0], {})
        table[key[-1]] = value
        self.places[key] = place


def read_file(path: Path | None) -> SettingsSource:
    """Read the TOML file, if there is one."""
    source = SettingsSource({(): str(path)})
    if path is None:
        return source
    try:
        source.values = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        expected, found = "a file that can be read", error.strerror or str(error)
    except RecursionError:
        expected, found = "TOML that can be read", "thousands of levels"
    except ValueError as error:  # TOML errors, bytes that are not UTF-8, or a number too long.
        expected, found = "TOML in UTF-8, with quotes around text", parser_error(error)
    else:
        return source
    source.problems.append(Problem(str(path), "", expected, found))
    return source


def variables(environ: Mapping[str, str]) -> list[str]:
    """The environment variables that set keys, or that seem to."""
    ours = {name for name in environ if name.startswith(ENV_PREFIX) and not _KUBERNETES.fullmatch(name)}
    return sorted(ours - NOT_KEYS)


def read_environment(environ: Mapping[str, str]) -> SettingsSource:
    """Read the environment variables ``DELAYER_…``."""
    source, known = SettingsSource({}), known_keys()
    names = {env_name(key): key for key in known}
    for name in variables(environ):
        place = f"environment variable {name}"
        if name.startswith("DELAYER_ROUTE_"):
            hint = "routes are set together: DELAYER_ROUTE='[{…}]'"
            source.problems.append(unknown_key(place, "", name, (), hint))
        elif name in names:
            source.read_text(names[name], known[names[name]], environ[name], place)
        else:
            source.problems.append(unknown_key(place, "", name, names))
    return source


def read_flags(given: Mapping[str, str]) -> SettingsSource:
    """Read the flags of the command line. A flag maps a dotted key to a string, as ``--set`` does."""
    source, known = SettingsSource({}), known_keys()
    names = {".".join(key): key for key in known}
    for name, text in given.items():
        if name in names:
            source.read_text(names[name], known[names[name]], text, f"flag {FLAGS.get(name, '--set')}")
        else:
            source.problems.append(unknown_key("flag --set", name, name, names))
    return source


class MergedSettings:
    """The merged values of some sources, the place of each value, and all errors so far."""

    def __init__(self, *sources: SettingsSource) -> None:
        """``sources``: highest priority first."""

        class Layers(BaseSettings):
            model_config = SettingsConfigDict(extra="allow", hide_input_in_errors=True)

            @classmethod
            def settings_customise_sources(cls, *_: object, **__: object) -> tuple[SettingsSource, ...]:
                return sources

            @classmethod
            def _settings_log_debug(cls, states: dict[str, dict[str, Any]]) -> None:
                """Disabled, because PYDANTIC_SETTINGS_DEBUG would log the values, including passwords."""

        self._sources = sources
        self.values = Layers().model_extra or {}
        self.problems = [problem for source in reversed(sources) for problem in source.problems]
        self._contents: dict[Key, str] = {}

    def origin(self, key: Key) -> str:
        """Say where the value at ``key`` was set; for a value inside a list, where the list was."""
        for length in range(len(key), 0, -1):
            part = key[:length]
            if part in self._contents:
                return self._contents[part]
            for source in self._sources:
                if value_at(source.values, part) is not None:
                    return source.place(part)
        return "defaults"

    def put(self, section: str, name: str, value: object, place: str) -> None:
        """Set a value read from the file ``place``."""
        self.values[section][name] = value
        self._contents[section, name] = place

    def note(self, key: Key, expected: str, found: str, hint: str = "") -> None:
        """Add an error in the value at ``key``."""
        self.problems.append(Problem(self.origin(key), ".".join(key), expected, found, hint))


class _NoList(Exception):
    """The text is no JSON list; what it is instead. The message shows nothing of the text, which may have passwords."""


def _read_text(field: FieldInfo, text: str) -> object:
    """Parse the raw value, as the file would have it. Raises _NoList if the key needs a list and ``text`` is none."""
    if get_origin(field.annotation) is tuple:
        try:
            value: object = json.loads(text)
        except ValueError as error:
            raise _NoList(f"no JSON: {parser_error(error)}") from None
        except RecursionError:
            raise _NoList("thousands of levels") from None
        if isinstance(value, dict):
            raise _NoList("an object: put it in [ ]")
        if not isinstance(value, list):
            raise _NoList("something else")
        return value
    if field.annotation in (int, bool) and not any(isinstance(rule, BeforeValidator) for rule in field.metadata):
        try:
            return json.loads(text.strip().lower())
        except ValueError:
            return text  # The model reports it.
    return text


def value_at(values: Any, loc: Sequence[str | int]) -> object:
    """The value at that place in these tables and lists; None if it does not exist."""
    for part in loc:
        try:
            values = values[part]
        except (KeyError, IndexError, TypeError):
            return None
    return values
