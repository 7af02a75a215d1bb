"""Routing, computed from a broker's list of its exchanges and bindings.

tests/conformance/test_topology_matching.py asks a broker how topics match.
"""

from __future__ import annotations

from typing import Any

import pytest

from delayer.broker.route_check import ExchangeRoutes, RouteVerdict, Verdict, key_matches, route
from delayer.core.topology import Binding

ROUTED, NOWHERE, DEPENDS, MISSING = map(
    RouteVerdict, (Verdict.ROUTED, Verdict.UNROUTABLE, Verdict.DEPENDS, Verdict.MISSING)
)


def queue(name: str, key: str = "", **arguments: Any) -> tuple[str, str, str, dict[str, Any]]:
    return (name, "queue", key, arguments)


def exchange(name: str, key: str = "", **arguments: Any) -> tuple[str, str, str, dict[str, Any]]:
    return (name, "exchange", key, arguments)


def stop(
    name: str,
    kind: str,
    *bindings: tuple[str, str, str, dict[str, Any]],
    alternate: str | None = None,
    internal: bool = False,
    **arguments: Any,
) -> tuple[str, ExchangeRoutes]:
    rows = [(Binding(name, to, what, key), table) for to, what, key, table in bindings]  # type: ignore[arg-type]
    return name, ExchangeRoutes(kind, rows, arguments=arguments, internal=internal, alternate=alternate)  # fmt: skip


def test_hashes_in_a_row_do_not_multiply() -> None:
    assert key_matches(b"#." * 30 + b"end", b"a." * 100 + b"end")
    assert not key_matches(b"#.a." * 30 + b"end", b"a." * 100 + b"ends")


@pytest.mark.parametrize(
    ("key", "stops", "expected"),
    [
        (b"k", [stop("x", "direct", queue("q", "k"))], ROUTED),
        (b"K", [stop("x", "direct", queue("q", "k"))], NOWHERE),
        (b"\xff", [stop("x", "direct", queue("q", "k"))], NOWHERE),
        (b"\xff\x00", [stop("x", "fanout", queue("q", "k"))], ROUTED),
        (b"\xff.a", [stop("x", "topic", queue("q", "*.a"))], ROUTED),
        (b"k", [stop("x", "fanout")], NOWHERE),
        (b"k", [], MISSING),
        (b"k", [stop("x", "fanout", queue("q"), internal=True)],
         RouteVerdict(Verdict.CLOSED, "the exchange is internal")),
        # exchanges behind exchanges
        (b"a.b", [stop("x", "topic", exchange("y", "a.#")), stop("y", "direct", queue("q", "a.b"))], ROUTED),
        (b"a.b", [stop("x", "topic", exchange("y", "a.#")), stop("y", "direct", queue("q", "a"))], NOWHERE),
        (b"k", [stop("x", "fanout", exchange("y")), stop("y", "fanout", exchange("x"))], NOWHERE),
        # alternates: only if no binding matches, and only of the exchange without a match
        (b"k", [stop("x", "direct", alternate="alt"), stop("alt", "fanout", queue("q"))],
         RouteVerdict(Verdict.ALTERNATE, "alt")),
        (b"k", [stop("x", "direct", alternate="alt")],
         RouteVerdict(Verdict.UNROUTABLE, "nor does its alternate 'alt'")),
        (b"k", [stop("x", "fanout", exchange("y"), alternate="alt"), stop("y", "fanout"),
                stop("alt", "fanout", queue("q"))], NOWHERE),
        (b"k", [stop("x", "fanout", exchange("y")), stop("y", "fanout", alternate="alt"),
                stop("alt", "fanout", queue("q"))], RouteVerdict(Verdict.ALTERNATE, "alt")),
        (b"k", [stop("x", "fanout", queue("q"), alternate="alt")], ROUTED),
        (b"k", [stop("x", "direct", alternate="")],
         RouteVerdict(Verdict.UNKNOWN, "an alternate exchange is the default exchange")),
        # headers: certain only if every message matches, or none
        (b"k", [stop("x", "headers", queue("q"))], ROUTED),
        (b"k", [stop("x", "headers", queue("q", **{"x-match": "any"}))], NOWHERE),
        (b"k", [stop("x", "headers", queue("q", colour="red"))], DEPENDS),
        (b"k", [stop("x", "headers", queue("q", **{"x-match": "all", "x-y": "1"}))], ROUTED),
        (b"k", [stop("x", "headers", queue("q", **{"x-match": "all-with-x", "x-y": "1"}))], DEPENDS),
        (b"k", [stop("x", "headers", queue("p", a="b"), queue("q"))], ROUTED),
        # exchange types of plugins
        (b"k", [stop("x", "x-random", queue("q"))],
         RouteVerdict(Verdict.UNKNOWN, "exchange 'x' is of type 'x-random'")),
        (b"k", [stop("x", "x-delayed-message", queue("q"))],
         RouteVerdict(Verdict.UNKNOWN, "exchange 'x' is of type 'x-delayed-message'")),
        (b"k", [stop("x", "x-delayed-message", queue("q", "k"), **{"x-delayed-type": "direct"})], ROUTED),
        (b"l", [stop("x", "x-delayed-message", queue("q", "k"), **{"x-delayed-type": "direct"})], NOWHERE),
    ],
)  # fmt: skip
def test_the_route_of_a_message(key: bytes, stops: list[tuple[str, ExchangeRoutes]], expected: RouteVerdict) -> None:
    assert route("x", key, dict(stops)) == expected
