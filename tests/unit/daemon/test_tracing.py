"""Tracing: a variable turns it on, and it needs an extra. What a message contains cannot disturb it."""

from __future__ import annotations

import asyncio
import logging
import struct
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from delayer.amqp.properties import byte_array, entry, int64, long_string, sized, splice, timestamp
from delayer.amqp.values import CONFIRMED, Outgoing, Pace
from delayer.broker.publisher import AmqpPublisher
from delayer.config.errors import ConfigError
from delayer.core.delay_headers import DELAY
from delayer.core.hold import Outcome
from delayer.core.marks import ID, LAST_DUE, RECEIVED_AT
from delayer.daemon.app import spans_of

NO_PROPERTIES = b"\0\0"
PARENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
NEAR_NOW = st.integers(-1_000, 1_000).map(lambda more: more + int(time.time() * 1000))
VALUES = st.one_of(
    (INT64 | NEAR_NOW).map(int64),
    st.floats().map(lambda value: b"d" + struct.pack(">d", value)),
    st.integers(0, (1 << 64) - 1).map(timestamp),
    st.tuples(st.integers(0, 255), st.integers(-(1 << 31), (1 << 31) - 1)).map(lambda d: b"D" + struct.pack(">Bi", *d)),
    st.binary(max_size=60).map(long_string),
    st.binary(max_size=60).map(byte_array),
    st.binary(max_size=10).map(lambda raw: sized(b"F", raw)),
    st.binary(max_size=10).map(lambda raw: sized(b"A", raw)),
    st.sampled_from([b"V", b"t\1", b"t\0"]),
)
PARENTS = st.one_of(st.just(long_string(PARENT)), VALUES, st.binary(min_size=55, max_size=55).map(long_string))


def float64(value: float) -> bytes:
    return b"d" + struct.pack(">d", value)


def test_a_collector_without_the_extra_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert spans_of({}) is None
    monkeypatch.delitem(sys.modules, "delayer.daemon.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_ENDPOINT: expected the extra otel"):
        spans_of({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"})


class Traced:
    """A publisher whose broker confirms everything, and the spans that it records."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("opentelemetry.sdk", reason="the extra otel")
        from delayer.daemon import tracing

        async def confirm(_self: AmqpPublisher, batch: Sequence[Outgoing], _pace: Pace | None = None) -> list[Outcome]:
            return [CONFIRMED for _ in batch]

        exporter = import_module("opentelemetry.sdk.trace.export.in_memory_span_exporter").InMemorySpanExporter()
        export = import_module("opentelemetry.sdk.trace.export")
        monkeypatch.setattr(AmqpPublisher, "publish", confirm)
        monkeypatch.setattr(tracing, "OTLPSpanExporter", lambda: exporter)
        monkeypatch.setattr(tracing, "BatchSpanProcessor", export.SimpleSpanProcessor)
        self._exporter = exporter
        self._publisher: Any = tracing.TracedPublisher.__new__(tracing.TracedPublisher)
        self._publisher.spans = tracing.Spans()
        self._encode = import_module("opentelemetry.exporter.otlp.proto.common.trace_encoder").encode_spans

    async def publish(self, headers: bytes, exchange: bytes = b"out", token: bytes = b"t") -> list[Any]:
        """Publish a message; returns its spans as a collector gets them."""
        self._exporter.clear()
        properties = splice(NO_PROPERTIES, append=entry(ID, long_string(token)) + headers)
        assert await self._publisher.publish([Outgoing(exchange, b"\xff", properties, b"", token)]) == [CONFIRMED]
        spans = self._exporter.get_finished_spans()
        encoded = self._encode(spans).SerializeToString()
        assert bool(encoded) == bool(spans)
        return list(spans)


def headers_of(**given: bytes) -> bytes:
    names = {"parent": b"traceparent", "due": LAST_DUE, "delay": DELAY, "noted": RECEIVED_AT}
    return b"".join(entry(names[name], value) for name, value in given.items())


@pytest.fixture(scope="module")
def traced() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        yield Traced(patch)


@given(PARENTS, VALUES, VALUES, VALUES, st.binary(max_size=9))
@example(long_string(PARENT), int64(1), float64(-1e308), b"V", b"out")
@example(long_string(PARENT), int64(1), float64(float("-inf")), b"V", b"out")
@example(long_string(PARENT), int64(5_000), int64(-9_000), b"V", b"out")
@example(long_string(PARENT), int64((1 << 63) - 1), b"V", b"V", b"out")
@example(long_string(PARENT), int64(-(1 << 63)), int64(-(1 << 63)), int64(-1), b"out")
@example(long_string(PARENT), int64(9), b"V", int64(-(1 << 63)), b"out")
@example(long_string(PARENT), long_string(b"1"), b"V", b"V", b"out")
@example(long_string(PARENT), b"V", b"V", b"V", b"out")
def test_no_header_stops_a_publish_or_loses_a_batch_of_spans(
    traced: Any, parent: bytes, due: bytes, delay: bytes, noted: bytes, exchange: bytes
) -> None:
    headers = headers_of(parent=parent, due=due, delay=delay, noted=noted)
    spans = asyncio.run(traced.publish(headers, exchange))
    assert len(spans) in (0, 2)
    for span in spans:
        assert 0 <= span.start_time <= span.end_time < 1 << 64


async def test_headers_that_cannot_be_read_are_not_traced(traced: Any) -> None:
    given = headers_of(parent=long_string(PARENT), due=int64(5_000), delay=int64(-1_000))
    assert [span.start_time for span in await traced.publish(given) if span.name == "delayer wait"] == [4 * 10**9]
    assert not await traced.publish(given + b"\x01zS\xff\0\0\0")
    for due in (long_string(b"5000"), timestamp(5), float64(5.0), b"V"):
        assert not await traced.publish(headers_of(parent=long_string(PARENT), due=due))


async def test_a_parent_of_another_length_costs_neither_a_span_nor_a_log_line(
    traced: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        for parent in (b"", PARENT + b" ", PARENT + b"-" + b"x" * 512, b"x" * 100_000):
            assert not await traced.publish(headers_of(parent=long_string(parent), due=int64(1)))
    assert not caplog.records
