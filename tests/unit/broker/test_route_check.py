"""Routing, computed from a broker's exchanges and bindings.

tests/conformance/test_topology_matching.py asks a broker how topics match.
"""

from __future__ import annotations

import pytest

from delayer.broker.route_check import ExchangeRoutes, RouteVerdict, Verdict, key_matches, route
from delayer.core.topology import Binding

ROUTED, NOWHERE = map(RouteVerdict, (Verdict.ROUTED, Verdict.UNROUTABLE))


def queue(name: str, key: str = "") -> tuple[str, str, str]:
    return (name, "queue", key)


def exchange(name: str, key: str = "") -> tuple[str, str, str]:
    return (name, "exchange", key)


def stop(
    name: str, kind: str, *bindings: tuple[str, str, str], alternate: str | None = None, internal: bool = False
) -> tuple[str, ExchangeRoutes]:
    rows = [Binding(name, to, what, key) for to, what, key in bindings]  # type: ignore[arg-type]
    return name, ExchangeRoutes(kind, rows, internal=internal, alternate=alternate)


def test_hashes_in_a_row_do_not_multiply() -> None:
    assert key_matches(b"#." * 30 + b"end", b"a." * 100 + b"end")
    assert not key_matches(b"#.a." * 30 + b"end", b"a." * 100 + b"ends")


@pytest.mark.parametrize(
    ("key", "stops", "expected"),
    [
        (b"k", [stop("x", "direct", queue("q", "k"))], ROUTED),
        (b"K", [stop("x", "direct", queue("q", "k"))], NOWHERE),
        (b"a", [stop("x", "direct", queue("q", "*"))], NOWHERE),
        (b"\xff", [stop("x", "direct", queue("q", "k"))], NOWHERE),
        (b"\xff\x00", [stop("x", "fanout", queue("q", "k"))], ROUTED),
        (b"\xff.a", [stop("x", "topic", queue("q", "*.a"))], ROUTED),
        (b"k", [stop("x", "fanout")], NOWHERE),
        (b"k", [stop("x", "fanout", queue("q"), internal=True)],
         RouteVerdict(Verdict.CLOSED, "the exchange is internal")),
        # exchanges bound to exchanges
        (b"a.b", [stop("x", "topic", exchange("y", "a.#")), stop("y", "direct", queue("q", "a.b"))], ROUTED),
        (b"a.b", [stop("x", "topic", exchange("y", "a.#")), stop("y", "direct", queue("q", "a"))], NOWHERE),
        (b"k", [stop("x", "fanout", exchange("y")), stop("y", "fanout", exchange("x"))], NOWHERE),
        # alternates: only if no binding matches, and only of the exchange without a match
        (b"k", [stop("x", "direct", alternate="alt")], RouteVerdict(Verdict.ALTERNATE, "alt")),
        (b"k", [stop("x", "fanout", exchange("y"), alternate="alt"), stop("y", "fanout")], NOWHERE),
        (b"k", [stop("x", "fanout", exchange("y")), stop("y", "fanout", alternate="alt")],
         RouteVerdict(Verdict.ALTERNATE, "alt")),
        (b"k", [stop("x", "fanout", queue("q"), alternate="alt")], ROUTED),
        # types with other rules
        (b"k", [stop("x", "headers", queue("q"))],
         RouteVerdict(Verdict.UNKNOWN, "exchange 'x' is of type 'headers'")),
        (b"k", [stop("x", "fanout", exchange("y")), stop("y", "x-random", queue("q"))],
         RouteVerdict(Verdict.UNKNOWN, "exchange 'y' is of type 'x-random'")),
        (b"k", [stop("x", "fanout", exchange("y"), queue("q")), stop("y", "x-random")], ROUTED),
    ],
)  # fmt: skip
async def test_the_route_of_a_message(
    key: bytes, stops: list[tuple[str, ExchangeRoutes]], expected: RouteVerdict
) -> None:
    async def exchange_of(name: str) -> ExchangeRoutes:
        return dict(stops)[name]

    assert await route("x", key, exchange_of) == expected
