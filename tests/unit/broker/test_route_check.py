"""Routing, computed from a broker's list of its exchanges and bindings.

tests/conformance/test_topology_matching.py asks a broker how topics match.
"""

from __future__ import annotations

from typing import Any

import pytest

from delayer.broker.route_check import ExchangeInfo, RouteMatch, RouteVerdict, Stop, Topics, Verdict, matcher, route
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
) -> tuple[str, Stop]:
    told = ExchangeInfo(name, kind, internal, alternate, arguments)
    rows = [(Binding(name, to, what, key), table) for to, what, key, table in bindings]  # type: ignore[arg-type]
    return name, Stop.of(told, rows)


def test_a_lookup_does_not_read_all_bindings() -> None:
    """A look-up among a hundred thousand patterns visits only the branches that match its words."""
    topics = Topics(Binding("x", f"q{n}", "queue", f"orders.{n}.#") for n in range(100_000))
    assert topics.matched(b"orders.70000.paid").queues == {"q70000"}
    assert topics.matched(b"#." * 100 + b"x") == RouteMatch()


def test_hashes_in_a_row_do_not_multiply() -> None:
    topics = Topics([Binding("x", "q", "queue", "#." * 30 + "end")])
    assert topics.matched(b"a." * 100 + b"end").queues == {"q"}
    assert not topics.matched(b"a." * 100 + b"ends").queues


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
        (b"k", [stop("x", "x-delayed-message", queue("q", "k"), **{"x-delayed-type": "direct"})], ROUTED),
        (b"l", [stop("x", "x-delayed-message", queue("q", "k"), **{"x-delayed-type": "direct"})], NOWHERE),
    ],
)  # fmt: skip
def test_the_route_of_a_message(key: bytes, stops: list[tuple[str, Stop]], expected: RouteVerdict) -> None:
    assert route("x", key, dict(stops)) == expected


def test_an_unknown_exchange_type_has_no_matcher() -> None:
    assert matcher(ExchangeInfo("x", "x-consistent-hash"), []) is None
    assert matcher(ExchangeInfo("x", "x-delayed-message"), []) is None
