"""Hosts that stand still for a while, as a process after SIGSTOP: none of their callbacks runs, and time goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from detangle import SimLoop
from detangle._context import current_host

Step = tuple[Any, asyncio.Handle]
_paused: dict[str, list[Step]] = {}


def install(loop: SimLoop) -> None:
    _paused.clear()
    execute: Callable[[Any, asyncio.Handle], None] = loop._execute

    def unless_paused(lane: Any, handle: asyncio.Handle) -> None:
        if _paused and (kept := _paused.get(handle._context.get(current_host))) is not None:  # type: ignore[attr-defined]
            kept.append((lane, handle))
        else:
            execute(lane, handle)

    loop._execute = unless_paused  # type: ignore[method-assign]


def pause(host: str) -> None:
    _paused.setdefault(host, [])


def resume(loop: SimLoop, host: str) -> None:
    for lane, handle in _paused.pop(host, ()):
        if not handle.cancelled():
            loop._enqueue_lane(lane, handle)


def is_paused(host: str) -> bool:
    return host in _paused
