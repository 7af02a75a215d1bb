"""RabbitMQ's programs: where they are, and whether they answer."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

from tests.support import ports
from tests.support.processes import StartFailed

# Debian's /usr/sbin/rabbitmq-server is a wrapper that insists on the user and the directories of the package.
_HOMES = ("/usr/lib/rabbitmq/bin",)


def answers(port: int, greeting: bytes) -> bool:
    """Whether something listens there and, if it was greeted, says something back."""
    try:
        with socket.create_connection((ports.HOST, port), timeout=2) as connection:
            connection.sendall(greeting)
            return not greeting or len(connection.recv(1)) == 1
    except OSError:
        return False


def find_programs(root: Path | None) -> Path:
    """As the broker sees them: in ``root``, where there is one."""
    if root is not None:
        for home in _HOMES:
            if (root / home.lstrip("/") / "rabbitmq-server").exists():
                return Path(home)
        raise StartFailed(f"there is no RabbitMQ in {root}; .ci/brokers unpacks one")
    on_path = shutil.which("rabbitmq-server")
    for home in [*_HOMES, *([str(Path(on_path).resolve().parent)] if on_path else [])]:
        if (Path(home) / "rabbitmq-server").exists():
            return Path(home)
    raise StartFailed("RabbitMQ is not installed; .ci/setup servers installs it")


def find(program: str) -> str:
    """On this machine."""
    found = shutil.which(program)
    if not found:
        raise StartFailed(f"{program} is not on PATH; it comes with Erlang, which .ci/setup servers installs")
    return found
