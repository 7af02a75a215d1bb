"""docs/json.md: the shapes of all JSON. `python -m tests.support.json_page` writes it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from delayer.fields import shapes
from delayer.http import problems
from tests.support import json_shapes, json_shapes_backlog
from tests.support.json_shapes import COMMANDS

PAGE = Path(__file__).parents[2] / "docs" / "json.md"
INTRODUCTION = """# Shapes of JSON

What `delayer … --json` and [the API](http.md#the-api) print. Fields that end in `_ms` are epoch milliseconds, or
durations in milliseconds. A later version may add a field, but none goes or changes its meaning, so ignore fields that
you do not know. `audit`, `backlog export`, `compact` and `restore` print one line. Errors of commands are text on
stderr, with an [exit code](../README.md#operate-it). Those of the API are a `ProblemShape`. Files of `delayer export`
are lines of another kind ([importing.md](importing.md)).

Tests check real outputs by this page, and `python -m tests.support.json_page` writes it.

## By command

| command | output |
|---|---|
"""


def _rows(shape: type) -> Iterator[str]:
    schema = TypeAdapter(shape).json_schema(ref_template="{model}")
    required = schema.get("required", ())
    for name, one in schema["properties"].items():
        text = " ".join(one.get("description", "").split())
        mark = "" if name in required else " (may be missing)"
        yield f"| `{name}`{mark} | {_kind(one)} | {text} |"


def _kind(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return f"[{schema['$ref']}](#{schema['$ref'].lower()})"
    if "anyOf" in schema:
        return " or ".join(map(_kind, schema["anyOf"]))
    if "enum" in schema:
        return ", ".join(f"`{one}`" for one in schema["enum"])
    kind = str(schema.get("type", "any"))
    if kind == "array":
        return f"list of {_inner(schema['items'])}"
    if kind == "object":
        inner = schema.get("additionalProperties")
        return f"object of {_inner(inner)}" if isinstance(inner, dict) else "object"
    return kind


def _inner(schema: dict[str, Any]) -> str:
    return f"({_kind(schema)})" if "anyOf" in schema else _kind(schema)


def _name(shape: Any) -> str:
    inner = getattr(shape, "__args__", None)
    return f"list of {_name(inner[0])}" if inner else f"[{shape.__name__}](#{shape.__name__.lower()})"


def _all() -> list[type]:
    modules = (shapes, problems, json_shapes, json_shapes_backlog)
    every = [(one, module.__name__) for module in modules for one in vars(module).values()]
    found = {one for one, name in every if hasattr(one, "__required_keys__") and one.__module__ == name}
    return sorted(found, key=lambda one: one.__name__)


def page() -> str:
    """The page."""
    lines = [INTRODUCTION.rstrip("\n")]
    for command, of in COMMANDS.items():
        option = "--file" if command == "send" else "--dry-run"
        other = f"; with `{option}` {_name(of[1])}" if len(of) > 1 else ""
        lines.append(f"| `{command}` | {_name(of[0])}{other} |")
    lines += ["", "The answers of the API have the shapes that `/api/openapi.json` names.", "", "## Shapes"]
    for shape in _all():
        lines += ["", f"### {shape.__name__}", ""]
        if shape.__doc__ and not shape.__doc__.startswith("dict("):
            lines += [" ".join(shape.__doc__.replace("``", "`").split()), ""]
        lines += ["| field | type | |", "|---|---|---|", *_rows(shape)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
