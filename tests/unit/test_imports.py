"""Imports go down only (design, section 8): the table of the house, and a reading of every module against it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "delayer"

# Modules without a layer of their own: values that say who and where we are.
FREE = frozenset({"delayer", "delayer.__version__"})
FAULTPOINT = "delayer.faultpoint"
# Parts of the standard library that would let the outside world into the core.
IMPURE = frozenset({"asyncio", "time", "logging"})


@dataclass(frozen=True, slots=True)
class Layer:
    """Which other layers one layer may import, and which packages it may not."""

    below: frozenset[str] = frozenset()
    never: frozenset[str] = frozenset()


def layer(*below: str, never: str = "") -> Layer:
    return Layer(frozenset(below), frozenset(never.split()))


HOUSE: Mapping[str, Layer] = {
    "faultpoint": layer(never="aio_pika sqlalchemy asyncpg pyspark"),
    "core": layer(),  # and nothing but the pure part of the standard library
    "wire": layer("core", never="aio_pika aiormq sqlalchemy asyncpg pyspark"),
    "store": layer("core", never="aio_pika aiormq pamqp pyspark"),
    "broker": layer("core", "wire", never="sqlalchemy asyncpg pyspark"),
    "services": layer("core", "wire", never="aio_pika aiormq sqlalchemy asyncpg pyspark"),
    "ops": layer("core", "services", never="aio_pika aiormq sqlalchemy asyncpg pyspark"),
    # HTTP: beside the daemon, asked by people and by Prometheus. Nothing but the edge imports it.
    "ops.http": layer(
        "core", "services", "store", "settings", "telemetry", never="aio_pika aiormq sqlalchemy asyncpg pyspark"
    ),
    "settings": layer("core", "wire", never="aio_pika aiormq sqlalchemy asyncpg pyspark"),
    # Services and their relay are the daemon's; an import parks through the store, and asks the broker.
    "legacy": layer("core", "store", "broker", "wire", never="aio_pika aiormq pyspark"),
    # The Spark job: nothing but the edge imports it, so that the daemon never starts a JVM.
    "audit": layer("core", "store", "broker", "wire", "settings", "telemetry", never="sqlalchemy"),
    "telemetry": layer("core", "settings", never="aio_pika aiormq sqlalchemy asyncpg pyspark"),
}
# The edge may import everything below it; what it may not is to be imported from below.
EDGE = frozenset({"cli", "commands", "app", "daemon", "in_force", "serving", "wiring"})
# What only the HTTP layer knows of.
OF_HTTP = frozenset({"starlette", "uvicorn", "prometheus_client"})


def violations(sources: Mapping[str, str]) -> list[str]:
    """What is wrong in these modules (dotted name -> source): one line each, with the module and the import."""
    return [
        f"{module}: {complaint}"
        for module, source in sorted(sources.items())
        for imported in _imports(module, source)
        if (complaint := _complaint(module, imported))
    ]


def _imports(module: str, source: str) -> Iterator[str]:
    """Dotted names of everything imported anywhere in the module, functions and TYPE_CHECKING blocks included."""
    for node in ast.walk(ast.parse(source, module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield "." * node.level + (node.module or "")
        elif isinstance(node, ast.ImportFrom) and node.module == "delayer":
            yield from (f"delayer.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def _complaint(module: str, imported: str) -> str | None:
    name = _layer_of(module)
    if imported.startswith("."):
        return f"imports {imported} relatively, which hides the layer"
    if name in EDGE or name == "":
        return None if imported.split(".", maxsplit=1)[0] != "pyspark" else "imports pyspark"
    if name not in HOUSE:
        return f"{name} is no layer: give it a row in {Path(__file__).name}"
    if imported.split(".", maxsplit=1)[0] == "delayer":
        return _complaint_about_layers(name, imported)
    return _complaint_about_packages(name, imported.split(".", maxsplit=1)[0])


def _complaint_about_layers(name: str, imported: str) -> str | None:
    target = _layer_of(imported)
    if imported in FREE or target == name or target in HOUSE[name].below:
        return None
    if imported.startswith(FAULTPOINT) and name != "core":
        return None
    return f"{name} imports {imported}"


def _complaint_about_packages(name: str, package: str) -> str | None:
    if name == "core" and (package not in sys.stdlib_module_names or package in IMPURE):
        return f"core imports {package}"
    if package in HOUSE[name].never or (package in OF_HTTP and name != "ops.http"):
        return f"{name} imports {package}"
    return None


def _layer_of(module: str) -> str:
    """`delayer.store.sql` -> "store", `delayer.ops.http.app` -> "ops.http"; the package itself -> ""."""
    _, _, rest = module.partition(".")
    first, _, inner = rest.partition(".")
    nested = f"{first}.{inner.partition('.')[0]}"
    return nested if nested in HOUSE else first


def _read_package() -> dict[str, str]:
    sources = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        sources[".".join(parts).removesuffix(".__init__")] = path.read_text()
    return sources


def test_imports_go_down_only() -> None:
    sources = _read_package()
    assert "delayer.core.message" in sources
    assert violations(sources) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("delayer.core.x", "import asyncio"),
        ("delayer.core.x", "def f():\n    from time import monotonic"),
        ("delayer.core.x", "import logging.config"),
        ("delayer.core.x", "import structlog"),
        ("delayer.core.x", "from delayer.wire import fields"),
        ("delayer.core.x", "from delayer.faultpoint import reach"),
        ("delayer.core.x", "from ..wire import fields"),
        ("delayer.wire.x", "import aio_pika.abc"),
        ("delayer.wire.x", "from delayer.services import ports"),
        ("delayer.services.x", "from sqlalchemy import text"),
        ("delayer.services.x", "from delayer import settings"),
        ("delayer.services.x", "import delayer.store.postgres"),
        ("delayer.services.x", "from delayer.broker.relay import Relay"),
        ("delayer.store.x", "from delayer.broker import relay"),
        ("delayer.legacy.x", "from delayer.services import intake"),
        ("delayer.legacy.x", "from delayer.settings import Settings"),
        ("delayer.store.x", "from delayer.wire import fields"),
        ("delayer.broker.x", "if TYPE_CHECKING:\n    from delayer.store import postgres"),
        ("delayer.settings.model", "import delayer.cli"),
        ("delayer.ops.notify", "import delayer.ops.http.app"),
        ("delayer.ops.http.x", "from delayer.broker import admin"),
        ("delayer.services.x", "import starlette"),
        ("delayer.cli", "import pyspark"),
        ("delayer.novelty", "import json"),
    ],
)
def test_a_planted_violation_is_found(module: str, source: str) -> None:
    assert len(violations({module: source})) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("delayer.core.x", "from __future__ import annotations\nimport datetime\nfrom delayer.core.message import Due"),
        ("delayer.wire.x", "import asyncio\nfrom delayer.faultpoint import reach\nfrom delayer import __version__"),
        ("delayer.services.x", "import time\nfrom delayer.wire.properties import Properties"),
        ("delayer.cli", "import click\nfrom delayer.store import postgres"),
    ],
)
def test_what_is_allowed_is_not_complained_about(module: str, source: str) -> None:
    assert violations({module: source}) == []
