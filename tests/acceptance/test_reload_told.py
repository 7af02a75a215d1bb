"""What `systemctl reload` waits for: a daemon's words, through a socket like systemd's, as it reads its file again."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.acceptance.place import Place
from tests.acceptance.world import secret_store_url, wait_for
from tests.support.daemon import DaemonProcess
from tests.support.servers import Postgres


async def test_systemd_hears_the_end_of_a_reload_when_it_is_in_force(
    place: Place, postgres: Postgres, schema: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "delayer.toml"
    store = {"store": {"url": secret_store_url(postgres, schema)}}
    place.write(config, "store", store)
    heard: list[str] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.bind(str(tmp_path / "notify"))
        line.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))

        def said(*words: str) -> Callable[[], bool]:
            """Whether a datagram had all these words since the last question that was answered so."""

            def look() -> bool:
                while True:
                    try:
                        heard.append(line.recv(4096).decode())
                    except BlockingIOError:
                        break
                found = [at for at, one in enumerate(heard) if all(word in one for word in words)]
                if found:
                    del heard[: found[0] + 1]
                return bool(found)

            return look

        async with DaemonProcess({}, config=config) as daemon:
            await daemon.ready()
            await wait_for(said("READY=1", "mode store"))

            place.write(config, "native", store)
            daemon.reload()
            await wait_for(said("RELOADING=1\nMONOTONIC_USEC="))
            await wait_for(said("READY=1", "STATUS=mode native"))
            assert (await daemon.event("mode switched"))["now"] == "native", "logged before it is said"

            config.write_text('mode = "nativ"\n')
            daemon.reload()
            await wait_for(said("RELOADING=1\nMONOTONIC_USEC="))
            await wait_for(said("READY=1", "STATUS=mode native; the last reload was refused", "nativ"))
            assert "nativ" in (await daemon.event("reload refused"))["reason"]
            assert await daemon.stop() == 0
            await wait_for(said("STOPPING=1"))
