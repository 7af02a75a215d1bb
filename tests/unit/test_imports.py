"""Modules import only lower layers: the table of layers, and a check of every module."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "delayer"

# Modules outside all layers: the version, and the code that every part uses after a loss or for held messages.
FREE = frozenset({"delayer", "delayer.__version__", "delayer.retry", "delayer.held"})
# The store's own knowledge of its lanes, which the daemon's ports leave out.
OF_THE_STORE = "delayer.store.lanes"
# Only these are aware that a message may be in a segment, and can read it there; the rest only see messages.
SEGMENTS = "delayer.store.segments"
OF_SEGMENTS = (
    SEGMENTS,
    "delayer.store.waiting",  # the read model
    "delayer.store.postgres",  # the daemon's restore
    "delayer.store.rows.keys",  # removes a cancelled message from its segment
    "delayer.store.admin.actions",  # a change restores its segment first
    # These count segments, and read none.
    "delayer.store.admin.stats",
    "delayer.store.admin.census",
    "delayer.store.admin.draining",
    "delayer.audit",  # Spark's jobs, compaction, restore
    "delayer.cli.segments",
)
# SQL that names the table of segments, and the files that may.
ON_SEGMENTS = re.compile(r"\b(?:FROM|JOIN|INTO|UPDATE|TABLE)\s+segment\b")
MAY_NAME_SEGMENTS = re.compile(r"(store/segments/|audit/|store/waiting\.py|store/sql/(\w+_segments?|audit_\w+)\.sql).*")
PURE = frozenset({"core", "headers"})
# The values and errors of AMQP: pure, so all layers exchange them, core included, as they exchange those of core.
AMQP_VALUES = frozenset({"delayer.amqp.values", "delayer.amqp.errors"})
# The AMQP client could be a separate library: apart from itself it imports only the standard library and pamqp.
OF_AMQP = frozenset({"pamqp"})
# Impure parts of the standard library, which the core may not import.
IMPURE = frozenset({"asyncio", "time", "logging"})
# Clients of servers, for adapters only.
DRIVERS = "aio_pika aiormq sqlalchemy asyncpg pyspark"


@dataclass(frozen=True, slots=True)
class Layer:
    """The other layers that a layer may import, and the packages that it may not."""

    below: frozenset[str] = frozenset()
    never: frozenset[str] = frozenset()


def layer(*below: str, never: str = "") -> Layer:
    return Layer(frozenset(below), frozenset(never.split()))


HOUSE: Mapping[str, Layer] = {
    "retry": layer("core", never=DRIVERS),
    "held": layer("core", never=DRIVERS),
    "core": layer(),  # and AMQP_VALUES, and the pure part of the standard library
    "headers": layer(),  # for publishers; the same
    "amqp": layer(),
    "format": layer("core", "amqp", "schedule", never=f"asyncio {DRIVERS}"),
    "schedule": layer("core", "amqp", never=f"asyncio time logging {DRIVERS}"),
    "config": layer("core", "amqp", never=DRIVERS),
    "broker": layer("core", "amqp", never="sqlalchemy asyncpg pyspark"),
    # A release writes the next occurrence of a schedule in its own transaction, so the store computes it.
    "store": layer("core", "format", "schedule", never="aio_pika aiormq pamqp pyspark"),
    "intake": layer("core", "amqp", "format", never=DRIVERS),
    "release": layer("core", "amqp", "format", never=DRIVERS),
    # The daemon imports neither `imports` nor `audit`: it never starts a JVM.
    "imports": layer("core", "amqp", "format", "schedule", "broker", "store", never="aio_pika aiormq pyspark"),
    "audit": layer("core", "amqp", "format", "broker", "store", "config", never="sqlalchemy"),
    "set_aside": layer("core", "amqp", "format", "broker", "store", "config", never=DRIVERS),
    "fields": layer("core", "amqp", "format", "schedule", "store", "config", never=DRIVERS),
    "http": layer("core", "amqp", "format", "schedule", "store", "config", "set_aside", "fields", never=DRIVERS),
}
# The edge may import everything below it, except the layers named here. Nothing below may import the edge.
EDGE: Mapping[str, frozenset[str]] = {
    "__main__": frozenset(),
    "cli": frozenset({"http"}),  # What both write and read is in `fields`.
    "daemon": frozenset({"imports", "audit", "cli"}),  # The command line starts the daemon.
}
# Only the HTTP layer uses these packages.
OF_HTTP = frozenset({"starlette", "uvicorn", "prometheus_client"})
# Only this layer reads cron expressions.
OF_SCHEDULE = frozenset({"cronsim"})


def violations(sources: Mapping[str, str]) -> list[str]:
    """Forbidden imports of these modules (dotted name -> source): one line each, with the module and the import."""
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
    if hidden := _complaint_about_hidden_parts(module, imported):
        return hidden
    if name in EDGE or name == "":
        if imported.startswith("delayer.") and _layer_of(imported) in EDGE.get(name, ()):
            return f"{name} imports {imported}"
        package = imported.split(".", maxsplit=1)[0]
        return f"{name} imports {package}" if package in OF_HTTP | OF_SCHEDULE | {"pyspark"} else None
    if name not in HOUSE:
        return f"{name} is no layer: give it a row in {Path(__file__).name}"
    pure = name in PURE or module in AMQP_VALUES
    if imported.split(".", maxsplit=1)[0] == "delayer":
        return _complaint_about_layers(name, imported)
    return _complaint_about_packages(name, imported.split(".", maxsplit=1)[0], pure=pure)


def _complaint_about_hidden_parts(module: str, imported: str) -> str | None:
    if imported.startswith("."):
        return f"imports {imported}: relatively, which hides the layer"
    if imported.startswith(OF_THE_STORE) and _layer_of(module) != "store":
        return f"imports {imported}: lanes, which only the store knows"
    if imported.startswith(SEGMENTS) and not module.startswith(OF_SEGMENTS):
        return f"imports {imported}: segments, whose messages delayer.store.waiting reads"
    return None


def _complaint_about_layers(name: str, imported: str) -> str | None:
    target = _layer_of(imported)
    if target == name or target in HOUSE[name].below:
        return None
    if name != "amqp" and imported in FREE | AMQP_VALUES:
        return None
    return f"{name} imports {imported}"


def _complaint_about_packages(name: str, package: str, *, pure: bool) -> str | None:
    if pure and (package not in sys.stdlib_module_names or package in IMPURE):
        return f"{name} imports {package}"
    if name == "amqp" and package not in sys.stdlib_module_names | OF_AMQP:
        return f"{name} imports {package}"
    if package in HOUSE[name].never or (package in OF_HTTP and name != "http"):
        return f"{name} imports {package}"
    if package in OF_SCHEDULE and name != "schedule":
        return f"{name} imports {package}"
    return None


def _layer_of(module: str) -> str:
    """`delayer.store.postgres` -> "store"; the package itself -> ""."""
    return module.partition(".")[2].partition(".")[0]


def read_package(package: Path = PACKAGE) -> dict[str, str]:
    sources = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        sources[".".join(parts).removesuffix(".__init__")] = path.read_text()
    return sources


def test_imports_only_go_down_the_layers() -> None:
    sources = read_package()
    assert "delayer.core.message" in sources
    assert violations(sources) == []


def test_only_few_files_name_the_table_of_segments() -> None:
    paths = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.sql")]
    sources = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in paths}
    naming = {name for name, text in sources.items() if ON_SEGMENTS.search(text)}
    assert {"store/waiting.py", "store/segments/restore.py", "store/sql/list_segments.sql"} <= naming
    assert [name for name in naming if not MAY_NAME_SEGMENTS.fullmatch(name)] == []
    reading = {name for name, text in sources.items() if re.search(r'read\("\w+_segments?"\)', text)}
    assert reading == {"store/segments/catalog.py", "store/segments/compact.py"}


def test_names_are_unique() -> None:
    """Classes and aliases of the package; constants only in core, which all layers import."""
    names = Counter(
        name
        for module, text in read_package().items()
        for name in map(_defined, ast.parse(text).body)
        if len(name) > 1 and name[0].isupper() and (not name.isupper() or module.startswith("delayer.core."))
    )
    assert [name for name, count in names.items() if count > 1] == []


def _defined(node: ast.stmt) -> str:
    """The name of a class, an alias or a constant; empty for others."""
    if isinstance(node, ast.ClassDef):
        return node.name
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return targets[0].id if targets and isinstance(targets[0], ast.Name) else ""


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("delayer.core.x", "import asyncio"),
        ("delayer.core.x", "def f():\n    from time import monotonic"),
        ("delayer.core.x", "import logging.config"),
        ("delayer.core.x", "import structlog"),
        ("delayer.core.x", "from delayer.amqp import properties"),
        ("delayer.core.x", "from delayer.broker import admin"),
        ("delayer.core.x", "from ..amqp import properties"),
        ("delayer.core.x", "from delayer.amqp.properties import Properties"),
        ("delayer.amqp.x", "import aio_pika.abc"),
        ("delayer.amqp.x", "import structlog"),
        ("delayer.amqp.x", "import delayer"),
        ("delayer.amqp.x", "from delayer.core.message import Parcel"),
        ("delayer.amqp.values", "import asyncio"),
        ("delayer.format.x", "from delayer.broker import publisher"),
        ("delayer.format.x", "from delayer.intake import handle"),
        ("delayer.broker.x", "from delayer.format import envelope"),
        ("delayer.amqp.x", "from delayer.broker import publisher"),
        ("delayer.release.x", "from sqlalchemy import text"),
        ("delayer.release.x", "from delayer.broker.publisher import AmqpPublisher"),
        ("delayer.intake.x", "from delayer import config"),
        ("delayer.intake.x", "from delayer.broker.consumer import AmqpConsumer"),
        ("delayer.intake.x", "from delayer.set_aside.queues import SetAside"),
        ("delayer.intake.x", "import delayer.store.postgres"),
        ("delayer.intake.x", "from delayer.release.loop import Release"),
        ("delayer.store.x", "from delayer.broker import publisher"),
        ("delayer.imports.x", "from delayer.intake import handle"),
        ("delayer.imports.x", "from delayer.config.model import Settings"),
        ("delayer.store.x", "from delayer.amqp import properties"),
        ("delayer.broker.x", "if TYPE_CHECKING:\n    from delayer.store import postgres"),
        ("delayer.config.model", "import delayer.cli.main"),
        ("delayer.daemon.x", "from delayer.audit import job"),
        ("delayer.daemon.x", "from delayer.cli.output import print_table"),
        ("delayer.cli.x", "from delayer.http import forms"),
        ("delayer.cli.x", "def f():\n    from delayer.http.view import View"),
        ("delayer.fields.x", "from delayer.http import forms"),
        ("delayer.fields.x", "from delayer.cli import options"),
        ("delayer.http.x", "from delayer.cli.output import print_json"),
        ("delayer.http.x", "from delayer.broker import admin"),
        ("delayer.release.x", "import starlette"),
        ("delayer.cli.main", "import pyspark"),
        ("delayer.cli.x", "import cronsim"),
        ("delayer.daemon.x", "from starlette.routing import Route"),
        ("delayer.cli.check", "from delayer.store.lanes.locks import application_of"),
        ("delayer.daemon.wiring", "from delayer.store.lanes import ownership"),
        ("delayer.store.x", "from delayer.release.ports import Lane"),
        ("delayer.store.admin.exporting", "from delayer.store.segments import catalog"),
        ("delayer.http.x", "from delayer.store.segments.codec import unpack"),
        ("delayer.headers", "import pika"),
        ("delayer.schedule.x", "from time import time"),
        ("delayer.store.x", "import cronsim"),
        ("delayer.schedule.x", "from delayer.store.clock import StoreClock"),
        ("delayer.novelty", "import json"),
    ],
)
def test_a_planted_violation_is_found(module: str, source: str) -> None:
    assert len(violations({module: source})) == 1
