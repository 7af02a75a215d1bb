"""OpenTelemetry spans for messages that carry a ``traceparent``: one for the wait, and one for the release inside it.

The standard variables turn it on, as OTEL_EXPORTER_OTLP_ENDPOINT=http://collector:4318 does. It needs the extra
``otel``. Both spans link to the publisher's. The message leaves as it would without them, and its consumer continues
the publisher's trace.

Source: opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables, semantic conventions for messaging.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from delayer.amqp.edits import ENVELOPE, ID, REFUSED
from delayer.amqp.properties import Properties, decoded
from delayer.broker.publisher import AmqpPublisher
from delayer.config.errors import ConfigError, Problem
from delayer.core.delay_headers import DELAY, LAST_DUE
from delayer.core.hold import Confirmed, Outcome
from delayer.core.message import Outgoing, Schedule, as_bytes, as_text

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
PARENT: Final = b"traceparent"
STATE: Final = b"tracestate"
BROKER_TIME: Final = b"timestamp_in_ms"
FLUSH_MS: Final = 1000
"""The longest that a stop waits for a collector."""


def provider() -> TracerProvider | None:
    """The source of spans; None unless a collector is named. Raises ConfigError if the extra is not installed."""
    named = [name for name in ENDPOINTS if os.environ.get(name)]
    if not named:
        return None
    if find_spec("opentelemetry") is None:
        raise ConfigError([Problem("environment", named[0], "the extra otel", "no Python package opentelemetry")])
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

    os.environ.setdefault("OTEL_SERVICE_NAME", "delayer")
    made = TracerProvider(shutdown_on_exit=False)
    made.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return made


def traced(provider: TracerProvider) -> Callable[..., AmqpPublisher]:
    """A class of publishers that make spans for what they release."""
    from opentelemetry import trace  # noqa: PLC0415
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

    tracer, propagator = provider.get_tracer("delayer"), TraceContextTextMapPropagator()

    def record(message: Outgoing, headers: dict[bytes, Any], began_ms: float, ended_ms: float) -> None:
        parent = {name.decode(): as_text(as_bytes(headers.get(name)) or b"") for name in (PARENT, STATE)}
        links = [trace.Link(trace.get_current_span(propagator.extract(parent)).get_span_context())]
        exchange = as_text(message.exchange)
        attributes = {
            "messaging.system": "rabbitmq",
            "messaging.destination.name": exchange,
            "messaging.rabbitmq.destination.routing_key": as_text(message.routing_key),
            "delayer.id": as_text(message.token),
        }
        arrived, began, ended = (round(at_ms * 1000) * 1000 for at_ms in (_arrived_ms(headers), began_ms, ended_ms))
        nowhere = trace.set_span_in_context(trace.INVALID_SPAN)
        wait = tracer.start_span("delayer wait", nowhere, trace.SpanKind.INTERNAL, attributes, links, arrived)
        within = trace.set_span_in_context(wait)
        tracer.start_span(f"send {exchange}", within, trace.SpanKind.PRODUCER, attributes, links, began).end(ended)
        wait.end(ended)

    class TracedPublisher(AmqpPublisher):
        async def publish(self, batch: Sequence[Outgoing], schedule: Schedule | None = None) -> list[Outcome]:
            called_ms = time.time() * 1000
            outcomes = await super().publish(batch, schedule)
            now_ms, written_ms = time.time() * 1000, {} if schedule is None else schedule.written_ms
            for index, (message, outcome) in enumerate(zip(batch, outcomes, strict=True)):
                headers = _of_released(message.properties) if isinstance(outcome, Confirmed) else None
                if headers is not None:
                    began_ms = written_ms.get(index, max(called_ms, headers[LAST_DUE]))
                    record(message, headers, began_ms, now_ms)
            return outcomes

    return TracedPublisher


def _of_released(properties: bytes) -> dict[bytes, Any] | None:
    """The headers that tell of the wait of a released message; None of one without a parent, or of another message."""
    if PARENT not in properties or ID not in properties:
        return None
    found = decoded(Properties.parse(properties), (PARENT, STATE, LAST_DUE, DELAY, BROKER_TIME, ENVELOPE, REFUSED))
    return None if found.keys() & {ENVELOPE, REFUSED} or not found.keys() >= {PARENT, LAST_DUE} else found


def _arrived_ms(headers: dict[bytes, Any]) -> float:
    """When the wait began, as far as the message tells: by its delay, by the broker's note, else when it was due."""
    due_ms, delay, noted = headers[LAST_DUE], headers.get(DELAY), headers.get(BROKER_TIME)
    if isinstance(delay, int | float) and delay < 0:
        return float(due_ms + delay)
    return float(min(noted, due_ms)) if isinstance(noted, int) else float(due_ms)
