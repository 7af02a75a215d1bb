"""A RabbitMQ of our own: one node, loopback only, with its own epmd, so it does not touch the machine's servers."""

from __future__ import annotations

import base64
import http.client
import itertools
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

from tests.support import ports
from tests.support.processes import (
    Family,
    Server,
    StartFailed,
    clean_environment,
    find_program,
    make_directory,
    remove_directory,
    tail,
)

ROOT_VARIABLE = "TEST_BROKER_ROOT"
"""The environment variable that names a directory with another Debian in it, whose RabbitMQ is used instead of ours."""

# Run in a separate mount namespace: the kernel removes the mounts when its last process exits.
_ENTER = 'mount --rbind /proc "$0/proc" && mount --rbind /dev "$0/dev" && exec chroot "$0" "$@"'

# Debian's /usr/sbin/rabbitmq-server is a wrapper that insists on the user and the directories of the package.
_HOMES = ("/usr/lib/rabbitmq/bin",)

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Certificates:
    """Files in PEM format for the broker's TLS listener; `verify_client` makes a client certificate mandatory."""

    ca: Path
    certificate: Path
    key: Path
    verify_client: bool = False


class RabbitMQ(Server):
    """One broker node. See settle() before kill().

    `config` are further lines of rabbitmq.conf, `hidden` settings without lines there. The only user is guest/guest,
    with all permissions. `peer` is another node; both share its epmd and its cookie, so that they can form a cluster.

    TEST_BROKER_ROOT=DIRECTORY uses the RabbitMQ of another Debian that was unpacked there (.ci/brokers); root only.
    """

    start_seconds = 60.0

    def __init__(
        self,
        *,
        tls: Certificates | None = None,
        config: Mapping[str, str | int] | None = None,
        hidden: Mapping[str, int] | None = None,
        peer: RabbitMQ | None = None,
    ) -> None:
        self.port = ports.reserve()
        self.management_port = ports.reserve()
        self.tls_port = ports.reserve() if tls else None
        self.node = f"delayer-{os.getpid()}-{next(_numbers)}@localhost"
        self._root = Path(root) if (root := os.environ.get(ROOT_VARIABLE)) else None
        self._programs = find_programs(self._root)
        self._dist_port = ports.reserve()
        self._peer = peer
        self._epmd_port: int = peer._epmd_port if peer else ports.reserve()
        self._cookie: str = peer._cookie if peer else secrets.token_hex(16)
        self._directory = make_directory(self._root and self._root / "tmp")
        self._epmd: Family | None = None
        self._write_files(tls, config or {})
        numbers = {"ERL_EPMD": self._epmd_port, "RABBITMQ_NODE": self.port, "RABBITMQ_DIST": self._dist_port}
        self._environment = environment(self._inside(self._directory), self.node, numbers, hidden or {})

    def start(self) -> Self:
        self.start_epmd()
        self._family = self._run("rabbitmq.log", self._programs / "rabbitmq-server")
        try:
            self._family.wait_ready(self._is_ready, "RabbitMQ", timeout=self.start_seconds)
        except StartFailed as failed:
            raise StartFailed(f"{failed}\n{tail(self._directory / 'log' / 'node.log')}") from None
        return self

    def start_epmd(self) -> None:
        """Start the epmd of this node and its peers, if this node has no peer and the epmd does not run yet."""
        if self._epmd is None and self._peer is None:
            self._epmd = self._run(
                "epmd.log", self._find("epmd"), "-port", str(self._epmd_port), "-address", ports.HOST
            )
            self._epmd.wait_ready(lambda: answers(self._epmd_port, b""), "epmd", timeout=10)

    def stop(self) -> None:
        """A clean stop: it closes the clients' connections, and takes five seconds because of the management plugin."""
        self._end(signal.SIGTERM, grace=30)

    def close(self) -> None:
        self.kill()
        if self._epmd:
            self._epmd.kill()
            self._epmd = None
        remove_directory(self._directory)

    def url(self, vhost: str = "/", *, port: int | None = None, user: str = "guest:guest") -> str:
        """amqp:// URL; `port` for a proxy before it."""
        return f"amqp://{user}@{ports.HOST}:{port or self.port}/{quote(vhost, safe='')}"

    def tls_url(self, vhost: str = "/", *, host: str = "localhost") -> str:
        assert self.tls_port, "started without certificates"
        return f"amqps://guest:guest@{host}:{self.tls_port}/{quote(vhost, safe='')}"

    @property
    def management_url(self) -> str:
        return f"http://guest:guest@{ports.HOST}:{self.management_port}"

    def log(self) -> str:
        """The node's log so far."""
        return (self._directory / "log" / "node.log").read_text(errors="replace")

    @cached_property
    def version(self) -> tuple[int, ...]:
        """Such as (3, 10, 8). From the log of its start, because the API may answer 500 just after that."""
        return tuple(map(int, re.findall(r"Starting RabbitMQ (\d+)\.(\d+)\.(\d+)", self.log())[-1]))

    @property
    def sorts_headers(self) -> bool:
        """Whether it hands header tables over sorted by name, each name once, as it does from 4.0 on."""
        return self.version >= (4,)

    @property
    def largest_body(self) -> int:
        """Default limit of a message's size, in bytes."""
        return (16 if self.version >= (4,) else 128) << 20

    @property
    def takes_any_delivery_mode(self) -> bool:
        """Whether it accepts a message whose delivery mode is neither 1 nor 2, as from 4.0 on."""
        return self.version >= (4,)

    @property
    def lists_queue_types(self) -> bool:
        """Whether it lists a queue that was declared without ``x-queue-type`` with one, as it does from 4.0 on."""
        return self.version >= (4,)

    @property
    def falls_over_clipped_names(self) -> bool:
        """Whether it closes the connection (541) if it must truncate the reason of a channel's close inside a
        character, as from 4.0 on."""
        return self.version >= (4,)

    @property
    def hides_queues(self) -> bool:
        """Whether it hides that a queue exists from a user who may not configure the queue, as from 4.3 on."""
        return self.version >= (4, 3)

    @property
    def cancels_slow_consumers(self) -> bool:
        """Whether it cancels a quorum queue's consumer after the consumer timeout, as from 4.3 on; older brokers close
        the channel."""
        return self.version >= (4, 3)

    @property
    def counts_only_failed_deliveries(self) -> bool:
        """Whether a quorum queue does not count a delivery returned by ``basic.nack`` after the end of its consumer, as
        from 4.3 on."""
        return self.version >= (4, 3)

    @property
    def knows_old_messages(self) -> bool:
        """Whether its code can still create messages in the format before 4.0, which the delayed-message plugin kept.
        The plugin cannot run from 4.3 on."""
        return self.version < (4, 3)

    @cached_property
    def delays_messages(self) -> bool:
        """Whether its quorum queues delay messages by ``x-opt-delivery-time``, as from 4.4 on. Tested with a message,
        because a build of that branch reports another version."""
        at = f"{quote(self.add_vhost(), safe='')}"
        queue = {"durable": True, "arguments": {"x-queue-type": "quorum"}}
        self.api("PUT", f"/api/queues/{at}/asked", queue)
        headers = {"x-opt-delivery-time": (int(time.time()) + 3600) * 1000}
        message = {
            "properties": {"headers": headers},
            "routing_key": "asked",
            "payload": "",
            "payload_encoding": "string",
        }
        assert self.api("POST", f"/api/exchanges/{at}/amq.default/publish", message)["routed"]
        taking = {"count": 1, "ackmode": "ack_requeue_false", "encoding": "auto"}
        taken = self.api("POST", f"/api/queues/{at}/asked/get", taking)
        self.api("DELETE", f"/api/vhosts/{at}")
        return not taken

    def add_vhost(self) -> str:
        """A fresh vhost, where guest may do everything; returns its name."""
        name = f"test-{secrets.token_hex(6)}"
        self.api("PUT", f"/api/vhosts/{quote(name, safe='')}")
        return name

    def drop_vhost(self, name: str) -> None:
        self.api("DELETE", f"/api/vhosts/{quote(name, safe='')}")

    def add_user(
        self, name: str, password: str, *, vhost: str, configure: str = "", write: str = "", read: str = ""
    ) -> None:
        """A user with these permissions (regular expressions; empty: nothing) in this vhost."""
        self.api("PUT", f"/api/users/{quote(name, safe='')}", {"password": password, "tags": ""})
        permissions = {"configure": configure, "write": write, "read": read}
        self.api("PUT", f"/api/permissions/{quote(vhost, safe='')}/{quote(name, safe='')}", permissions)

    def api(self, method: str, path: str, body: object = None) -> Any:
        """Send one request to the management API as guest; return the decoded answer, or None."""
        headers = {
            "Authorization": "Basic " + base64.b64encode(b"guest:guest").decode(),
            "Content-Type": "application/json",
        }
        with closing(http.client.HTTPConnection(ports.HOST, self.management_port, timeout=30)) as connection:
            connection.request(method, path, json.dumps(body) if body is not None else "", headers)
            response = connection.getresponse()
            answer = response.read()
        if response.status >= 300:
            raise RuntimeError(f"{method} {path}: {response.status} {answer.decode(errors='replace')}")
        return json.loads(answer) if answer else None

    def ctl(self, *words: str) -> str:
        """Run rabbitmqctl. It takes a second or two, so use it only if the API cannot help (alarms, say)."""
        return self.run_tool("rabbitmqctl", *words)

    def run_tool(self, tool: str, *words: str, timeout: float = 60.0) -> str:
        """Run one of the broker's command-line tools against this node; return its output."""
        done = subprocess.run(
            self._entering(self._programs / tool, "--quiet", *words),
            env=self._environment, cwd=self._directory, capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{tool} {' '.join(words)}: {done.stdout}{done.stderr}")
        return done.stdout

    def settle(self) -> None:
        """Call this before kill() if a queue was declared or a vhost was made within the last seconds.

        RabbitMQ 3.10 writes the place of a quorum queue's log to disk up to three seconds after it confirmed messages
        into that queue. If it is killed before that, the queue never answers again: its own loss, not ours.
        """
        self.ctl("eval", "[dets:sync(Table) || Table <- dets:all()].")

    def _run(self, log: str, *argv: str | Path) -> Family:
        return Family(self._entering(*argv), env=self._environment, cwd=self._directory, log=self._directory / log)

    def _entering(self, *argv: str | Path) -> list[str]:
        """The command, in the other root if there is one."""
        enter = ["unshare", "--mount", "sh", "-c", _ENTER, str(self._root)] if self._root else []
        return [*enter, *map(str, argv)]

    def _inside(self, path: Path) -> Path:
        """A path as the broker sees it. A file outside its root is copied into it."""
        if self._root is None:
            return path
        if not path.is_relative_to(self._root):
            copy = self._directory / f"{next(_numbers)}-{path.name}"
            shutil.copyfile(path, copy)
            path = copy
        return Path("/") / path.relative_to(self._root)

    def _find(self, program: str) -> str:
        if self._root is not None:
            return f"/usr/bin/{program}"
        return str(find_program(program, of="Erlang"))

    def _is_ready(self) -> bool:
        plain = answers(self.port, b"AMQP\x00\x00\x09\x01") and answers(self.management_port, b"")
        # RabbitMQ 4 may open its TLS listener last.
        return plain and (self.tls_port is None or answers(self.tls_port, b""))

    def _write_files(self, tls: Certificates | None, more: Mapping[str, str | int]) -> None:
        for name in ("home", "log", "data", "conf.d"):
            (self._directory / name).mkdir()
        cookie = self._directory / "home" / ".erlang.cookie"
        cookie.write_text(self._cookie)
        cookie.chmod(0o400)
        settings: dict[str, str | int] = {
            "listeners.tcp.1": f"{ports.HOST}:{self.port}",
            "management.tcp.ip": ports.HOST,
            "management.tcp.port": self.management_port,
            "log.file": "node.log",
            "log.console": "false",
            "disk_free_limit.absolute": "10MB",
            "raft.wal_max_size_bytes": 64 << 20,
        }
        if tls:
            settings |= {
                "listeners.ssl.1": f"{ports.HOST}:{self.tls_port}",
                "ssl_options.cacertfile": str(self._inside(tls.ca)),
                "ssl_options.certfile": str(self._inside(tls.certificate)),
                "ssl_options.keyfile": str(self._inside(tls.key)),
                "ssl_options.verify": "verify_peer" if tls.verify_client else "verify_none",
                "ssl_options.fail_if_no_peer_cert": "true" if tls.verify_client else "false",
            }
        lines = [f"{key} = {value}\n" for key, value in (settings | dict(more)).items()]
        (self._directory / "rabbitmq.conf").write_text("".join(lines))
        (self._directory / "rabbitmq-env.conf").write_text("")
        # A vhost through the management API costs milliseconds, through rabbitmqctl seconds.
        (self._directory / "enabled_plugins").write_text("[rabbitmq_management].\n")


def environment(at: Path, node: str, numbers: Mapping[str, int], hidden: Mapping[str, int]) -> dict[str, str]:
    """The environment of a broker with the directory ``at``. ``numbers``: its ports by variable. ``hidden``: settings
    without lines in rabbitmq.conf."""
    # Two schedulers are enough for tests, and on small machines idle ones must not spin.
    erl = "+S 2:2 +SDcpu 1 +SDio 4 +A 4 -kernel inet_dist_use_interface {127,0,0,1}"
    erl += "".join(f" -rabbit {name} {value}" for name, value in hidden.items())
    return clean_environment("RABBITMQ_", "ERL_", "NOTIFY_SOCKET", "LC_", "LANG") | {
        "HOME": str(at / "home"),
        "LC_ALL": "C.UTF-8",
        "ERL_EPMD_ADDRESS": ports.HOST,
        "RABBITMQ_NODENAME": node,
        "RABBITMQ_MNESIA_BASE": str(at / "data"),
        "RABBITMQ_LOG_BASE": str(at / "log"),
        "RABBITMQ_PID_FILE": str(at / "pid"),
        "RABBITMQ_CONF_ENV_FILE": str(at / "rabbitmq-env.conf"),
        "RABBITMQ_CONFIG_FILE": str(at / "rabbitmq.conf"),
        "RABBITMQ_CONFIG_FILES": str(at / "conf.d"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(at / "enabled_plugins"),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": erl,
        **{f"{whose}_PORT": str(port) for whose, port in numbers.items()},
    }


def answers(port: int, greeting: bytes) -> bool:
    """Whether a server listens there and, after a greeting, answers."""
    try:
        with socket.create_connection((ports.HOST, port), timeout=2) as connection:
            connection.sendall(greeting)
            return not greeting or len(connection.recv(1)) == 1
    except OSError:
        return False


def find_programs(root: Path | None) -> Path:
    """The broker's programs, as a path inside ``root`` if there is one."""
    if root is not None:
        for home in _HOMES:
            if (root / home.lstrip("/") / "rabbitmq-server").exists():
                return Path(home)
        raise StartFailed(f"there is no RabbitMQ in {root}; .ci/brokers unpacks one")
    return find_program("rabbitmq-server", *_HOMES, of="RabbitMQ").resolve().parent


def main() -> int:
    """Print the version of the broker that tests would use."""
    with RabbitMQ() as broker:
        print(".".join(map(str, broker.version)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
