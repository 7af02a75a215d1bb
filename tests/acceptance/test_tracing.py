"""The spans of a real daemon, as a collector in this process receives them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from tests.acceptance.own_vhost import OwnVhost, delayed
from tests.support.raw import Message, text

otlp = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason="the extra otel")
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACED = (b"traceparent", text(f"00-{TRACE}-{PARENT}-01"))
DELAY_MS = 1_300


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Its URL, and the spans that it has received."""
    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = otlp.ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
            spans.extend(one for found in request.resource_spans for scope in found.scope_spans for one in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Write nothing to stderr."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", spans
        finally:
            server.shutdown()
            thread.join()


def sent(body: str, *headers: tuple[bytes, Any]) -> Message:
    message = delayed(body, DELAY_MS)
    return message._replace(props=replace(message.props, headers=(*message.props.headers, *headers)))


@pytest.mark.parametrize("mode", ["store", "native"])
async def test_a_traced_message_has_a_span_for_its_wait_and_one_for_its_release(
    mode: str, place: OwnVhost, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collector() as (url, spans):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        async with place.working(place.environ(mode, store)) as (daemon, raw, inbox):
            await raw.publish(sent("traced", TRACED), sent("plain"))
            await inbox.got([b"traced", b"plain"])
            assert TRACED in inbox.only(b"traced").props.headers
            assert await daemon.stop() == 0
        wait, release = sorted(spans, key=lambda span: span.name)
        assert (wait.name, release.name) == ("delayer wait", "send out")
        assert release.parent_span_id == wait.span_id
        links = [(one.trace_id.hex(), one.span_id.hex()) for span in spans for one in span.links]
        assert links == [(TRACE, PARENT)] * 2
        assert (release.start_time_unix_nano - wait.start_time_unix_nano) // 1_000_000 >= DELAY_MS


async def test_a_missing_collector_does_not_affect_messages(
    place: OwnVhost, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    async with place.working(place.environ("store", store)) as (daemon, raw, inbox):
        await raw.publish(sent("traced", TRACED), sent("odd", (b"traceparent", text("?"))))
        await inbox.got([b"traced", b"odd"])
        assert await daemon.stop() == 0
