"""The logs of commands, most of which end without a line: configured when the first one is written, and not before, as
loading what it takes needs as long as asking a store.

That line may come from a library, by the standard library's logging, or from a module of ours: then structlog has been
loaded meanwhile, which by itself would print it on stdout, where the answer of the command stands.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_LIBRARY = "structlog"


def arrange() -> None:
    """From now on the first line gets the logs configured: errors, on stderr. The daemon configures again."""
    logging.getLogger().handlers[:] = [_FirstRecord()]
    if _LIBRARY in sys.modules:
        _pass_first_line_on(sys.modules[_LIBRARY])
    elif not any(isinstance(one, _Watch) for one in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


def _configure(*, at_once: bool = False) -> None:
    """Unless somebody has, since. ``at_once``: although somebody has taken the handlers."""
    if at_once or any(isinstance(one, _FirstRecord) for one in logging.getLogger().handlers):
        from delayer import telemetry  # noqa: PLC0415

        telemetry.configure("console", "error")


class _FirstRecord(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _configure()
        logger = logging.getLogger(record.name)
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)


def _pass_first_line_on(structlog: Any) -> None:
    """Until somebody configures it, structlog configures the logs with a line, and writes that line then."""

    def again(logger: logging.Logger, method: str, event: dict[str, Any]) -> dict[str, Any]:
        structlog.reset_defaults()  # whatever comes of the next line: this one is not to come by here again, for ever
        _configure(at_once=True)
        getattr(structlog.get_logger(logger.name), method)(**event)
        raise structlog.DropEvent

    structlog.configure(processors=[again], logger_factory=structlog.stdlib.LoggerFactory())


class _Watch(MetaPathFinder):
    """Finds nothing itself, and sees that structlog is loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _LIBRARY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Told(spec.loader)
        return spec


class _Told(Loader):
    """Another loader, and what is to be done when it has loaded."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _pass_first_line_on(module)
