"""Tracing: a variable turns it on, and it needs an extra."""

from __future__ import annotations

import sys

import pytest

from delayer.config.errors import ConfigError
from delayer.daemon.app import spans_of


def test_a_collector_without_the_extra_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert spans_of({}) is None
    monkeypatch.delitem(sys.modules, "delayer.daemon.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_ENDPOINT: expected the extra otel"):
        spans_of({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"})
