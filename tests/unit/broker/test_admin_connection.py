"""The connection for administration, without a broker."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import warnings

import pytest

from delayer.broker.admin_connection import AdminConnection
from delayer.broker.errors import BrokerUnreachable


def test_a_failed_connection_leaves_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the driver closes it when Python collects it, perhaps in a thread without a loop."""
    monkeypatch.setattr(logging.getLogger("aiormq"), "disabled", True)  # pytest keeps logged errors alive
    monkeypatch.setattr(logging.getLogger("aiormq.connection"), "disabled", True)
    kept: list[BaseException] = []

    async def open_it(port: int) -> None:
        try:
            await AdminConnection.open(f"amqp://127.0.0.1:{port}/", name="test", patience=5)
        except BrokerUnreachable as error:
            kept.append(error)

    def collect_it() -> None:
        kept.clear()
        gc.collect()

    loop = asyncio.new_event_loop()
    with socket.socket() as taken, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        taken.bind(("127.0.0.1", 0))  # bound, but not listening
        loop.run_until_complete(open_it(taken.getsockname()[1]))
        assert kept
        loop.run_until_complete(asyncio.to_thread(collect_it))
    loop.close()
    assert [str(one.message) for one in told if issubclass(one.category, RuntimeWarning)] == []
