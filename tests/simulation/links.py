"""Connections that lose the packets of one direction, or are slow, for a while. detangle cuts both directions only."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from detangle import SimLoop

SLOW: Final = ((0.05, 0.5), (0.3, 1.5), (1.0, 4.0))
"""The shortest and the longest seconds that a packet may take."""
_lossy: set[tuple[str, str]] = set()


def install(loop: SimLoop) -> None:
    """A connection that begins meanwhile is made though the answer to its first packet is lost; then it is silent."""
    _lossy.clear()
    network = loop.net
    both = network.can_deliver
    network.can_deliver = (  # type: ignore[method-assign]
        lambda source, target: (source, target) not in _lossy and both(source, target)
    )


def lose(source: str, target: str) -> None:
    _lossy.add((source, target))


def restore(source: str, target: str) -> None:
    _lossy.discard((source, target))


def take(loop: SimLoop, seconds: tuple[float, float]) -> tuple[float, float]:
    """Let packets take so long from now on. Returns how long they took until now."""
    before: tuple[float, float] = loop.net.config.latency
    loop.net.config = replace(loop.net.config, latency=seconds)
    return before
