"""OpenTelemetry spans for messages that carry a ``traceparent``: one for the delay, with the release inside it.

Both spans link to the publisher's. The message itself does not change, and its consumer continues the publisher's
trace. This module needs the extra ``otel``.

Source: opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables, semantic conventions for messaging.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from delayer.amqp.properties import decoded, parsed
from delayer.amqp.values import Confirmed, Outgoing, Pace
from delayer.broker.publisher import AmqpPublisher
from delayer.core.delay_headers import DELAY
from delayer.core.hold import Outcome
from delayer.core.marks import ID, LAST_DUE, RECEIVED_AT
from delayer.core.message import as_bytes, as_text
from delayer.format.envelope import ENVELOPE
from delayer.format.headers import REFUSED

PARENT: Final = b"traceparent"
PARENT_BYTES: Final = 55
"""Of version 00. OpenTelemetry logs each longer one than 512 characters."""


class Spans:
    """Creates spans, which a thread sends to the collector that the standard variables name."""

    def __init__(self) -> None:
        os.environ.setdefault("OTEL_SERVICE_NAME", "delayer")
        self._provider = TracerProvider(shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("delayer")
        self._propagator = TraceContextTextMapPropagator()

    def publisher(self, *arguments: Any, **named: Any) -> AmqpPublisher:
        """Create an AmqpPublisher that records spans for the messages it releases."""
        made = TracedPublisher(*arguments, **named)
        made.spans = self
        return made

    def flush(self) -> None:
        """Send the last spans, waiting at most a second for the collector."""
        self._provider.force_flush(1000)

    def record(self, message: Outgoing, headers: dict[bytes, Any], began_ms: float, ended_ms: float) -> None:
        """Record the two spans of a message that was published from ``began_ms`` to ``ended_ms`` (epoch)."""
        parent = self._propagator.extract({PARENT.decode(): as_text(headers[PARENT])})
        links = [trace.Link(trace.get_current_span(parent).get_span_context())]
        attributes = {
            "messaging.system": "rabbitmq",
            "messaging.destination.name": (exchange := as_text(message.exchange)),
            "messaging.rabbitmq.destination.routing_key": as_text(message.routing_key),
            "delayer.id": as_text(message.token),
        }
        instants = (min(_arrived_ms(headers), began_ms), began_ms, ended_ms)
        arrived, began, ended = (round(at_ms * 1000) * 1000 for at_ms in instants)
        wait = self._tracer.start_span("delayer wait", None, trace.SpanKind.INTERNAL, attributes, links, arrived)
        kind, within = trace.SpanKind.PRODUCER, trace.set_span_in_context(wait)
        self._tracer.start_span(f"send {exchange}", within, kind, attributes, links, began).end(ended)
        wait.end(ended)


class TracedPublisher(AmqpPublisher):
    """Created by :meth:`Spans.publisher`."""

    spans: Spans

    async def publish(self, batch: Sequence[Outgoing], pace: Pace | None = None) -> list[Outcome]:
        called_ms = time.time() * 1000
        outcomes = await super().publish(batch, pace)
        now_ms, written_ms = time.time() * 1000, {} if pace is None else pace.written_ms
        for index, (message, outcome) in enumerate(zip(batch, outcomes, strict=True)):
            headers = _of_released(message.properties) if isinstance(outcome, Confirmed) else None
            if headers is not None:
                began_ms = written_ms.get(index, min(max(called_ms, headers[LAST_DUE]), now_ms))
                self.spans.record(message, headers, began_ms, now_ms)
        return outcomes


def _of_released(properties: bytes) -> dict[bytes, Any] | None:
    """Return the headers that describe a released message's delay, the parent as bytes; None if it is not one, or has
    no parent."""
    if PARENT not in properties or ID not in properties:
        return None
    found = decoded(parsed(properties), (PARENT, LAST_DUE, DELAY, RECEIVED_AT, ENVELOPE, REFUSED))
    parent = as_bytes(found.get(PARENT)) or b""
    if found.keys() & {ENVELOPE, REFUSED} or type(found.get(LAST_DUE)) is not int or len(parent) != PARENT_BYTES:
        return None
    return found | {PARENT: parent}


def _arrived_ms(headers: dict[bytes, Any]) -> float:
    """Return when the delay began, by its length or by the broker's note. If neither is known, return when it was
    due. Publishers set both headers to anything, and a span outside the epoch would cost its whole batch."""
    due_ms, delay, noted = headers[LAST_DUE], headers.get(DELAY), headers.get(RECEIVED_AT)
    if isinstance(delay, int | float) and delay < 0:
        return float(max(0, due_ms + max(delay, -due_ms)))
    return float(max(0, min(noted, due_ms))) if isinstance(noted, int) else float(max(0, due_ms))
