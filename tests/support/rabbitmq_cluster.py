"""A RabbitMQ cluster of three nodes on this machine, for tests that kill, pause, stop and drain single nodes.

    with RabbitMQCluster() as cluster:
        vhost = cluster.nodes[0].add_vhost()
        ...
        leader = cluster.leader_of("delays", vhost)
        leader.kill()
        successor = cluster.wait_for_leader("delays", vhost, other_than=leader)
        leader.start()
        cluster.wait_whole()

All methods block: from a coroutine, `await asyncio.to_thread(cluster.wait_whole)`.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from tests.support.processes import StartFailed
from tests.support.rabbitmq import RabbitMQ

T = TypeVar("T")
NODES: Final = 3
SECONDS: Final = 120.0
"""The deadline of every wait: a node that restarts on a busy machine may need half of it."""
_POLL_SECONDS: Final = 0.1
REJOIN_SECONDS: Final = 20.0
"""How long a resumed node may take to rejoin by itself."""
TICK_SECONDS: Final = 20
"""The other nodes drop a paused node after this time or a quarter more, and until then some of their work waits for it.
RabbitMQ's default is 60 s."""
_CONFIG: Final[Mapping[str, str | int]] = {"cluster_partition_handling": "pause_minority", "net_ticktime": TICK_SECONDS}
_LEADER: Final = """
    {{ok, Q}} = rabbit_amqqueue:lookup(rabbit_misc:r(<<{vhost}>>, queue, <<{queue}>>)),
    case ra_leaderboard:lookup_leader(element(1, amqqueue:get_pid(Q))) of {{_, Node}} -> Node; _ -> none end.
"""
"""An Erlang expression for the name of a queue's leader."""
_UNAVAILABLE: Final = (OSError, RuntimeError, http.client.HTTPException, subprocess.TimeoutExpired)
"""Errors of a request to a node that is down, starting, or without a majority."""


class Node(RabbitMQ):
    """One node of a cluster.

    The verbs of :class:`Server` apply to it: kill(), start() after it, pause() and resume() (SIGSTOP and SIGCONT of all
    its processes). Call RabbitMQCluster.settle() before the first kill().
    """

    start_seconds = SECONDS
    paused = False
    app_stopped = False
    drained = False

    @property
    def running(self) -> bool:
        """Whether its processes exist."""
        return self._family is not None

    @property
    def serving(self) -> bool:
        """Whether no verb has taken it away from its clients. A node without a majority counts as serving."""
        return self.running and not (self.paused or self.app_stopped or self.drained)

    def kill(self) -> None:
        super().kill()
        self.paused = self.app_stopped = self.drained = False

    def pause(self) -> None:
        super().pause()
        self.paused = True

    def resume(self) -> None:
        super().resume()
        self.paused = False

    def stop_app(self) -> None:
        """Stop RabbitMQ cleanly, and leave the Erlang VM running. Takes five seconds, and more with many
        queues, because it hands over the leadership of each."""
        self.run_tool("rabbitmqctl", "stop_app", timeout=SECONDS)
        self.app_stopped = True

    def start_app(self) -> None:
        self.run_tool("rabbitmqctl", "start_app", timeout=SECONDS)
        self.app_stopped = False

    def drain(self) -> None:
        """Put it into maintenance mode, as before an upgrade: it closes its clients' connections, rejects new ones, and
        hands over the leadership of its queues."""
        self.run_tool("rabbitmq-upgrade", "drain", timeout=SECONDS)
        self.drained = True

    def revive(self) -> None:
        """End maintenance mode."""
        self.run_tool("rabbitmq-upgrade", "revive", timeout=SECONDS)
        self.drained = False

    def heal(self) -> None:
        """Undo every verb. Does not wait for the cluster."""
        if self.paused:
            self.resume()
        if not self.running:
            try:
                self.start()
            except StartFailed:  # A node may end if it asks another one that is just starting; systemd restarts it.
                self.start()
        if self.app_stopped:
            self.start_app()
        if self.drained:
            self.revive()

    def ctl_json(self, *words: str) -> Any:
        return json.loads(self.ctl(*words, "--formatter", "json"))


class RabbitMQCluster:
    """Three nodes that can reach each other. `with` starts them and forms the cluster, and at the end removes it.

    `config` and `hidden`: as for RabbitMQ, the same for all nodes.
    """

    def __init__(
        self, *, config: Mapping[str, str | int] | None = None, hidden: Mapping[str, int] | None = None
    ) -> None:
        settings = {**_CONFIG, **(config or {})}
        first = Node(config=settings, hidden=hidden)
        self.nodes = [first, *(Node(config=settings, hidden=hidden, peer=first) for _ in range(NODES - 1))]

    def start(self) -> Self:
        """Start the nodes at the same time, and join the rest to the first one."""
        first, *rest = self.nodes
        first.start_epmd()
        _at_once(Node.start, self.nodes)
        _at_once(Node.stop_app, rest)
        for node in rest:
            node.ctl("join_cluster", first.node)
        _at_once(Node.start_app, rest)
        self.wait_whole()
        return self

    def close(self) -> None:
        """End all nodes, the first one last because it has the epmd, and delete their data."""
        for node in reversed(self.nodes):
            node.close()

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def urls(self, vhost: str = "/") -> list[str]:
        """The amqp:// URL of each node."""
        return [node.url(vhost) for node in self.nodes]

    def others(self, *nodes: Node) -> list[Node]:
        """The nodes apart from these."""
        return [node for node in self.nodes if node not in nodes]

    def node_at(self, port: int) -> Node:
        """The node with this AMQP port."""
        return next(node for node in self.nodes if node.port == port)

    def api(self, method: str, path: str, body: object = None) -> Any:
        """Send one request to the management API of the first node that answers; return the decoded answer."""
        return self._first(lambda node: node.api(method, path, body))

    def leader_of(self, queue: str, vhost: str = "/") -> Node | None:
        """The leader of a quorum queue, as the first node that answers knows it; None while there is none.

        The management API and `list_queues` ask all nodes, and wait a minute for a paused node.
        """
        ask = _LEADER.format(vhost=json.dumps(vhost), queue=json.dumps(queue))
        answer = self._first(lambda node: node.ctl_json("eval", ask))
        return next((node for node in self.nodes if node.node == answer["value"]), None)

    def wait_for_leader(self, queue: str, vhost: str = "/", *, other_than: Node | None = None) -> Node:
        """Wait until the queue has a leader, apart from this node."""

        def led() -> Node | None:
            leader = self.leader_of(queue, vhost)
            return None if leader is other_than else leader

        return _poll(led, f"queue {queue} has no leader")

    def settle(self) -> None:
        """See RabbitMQ.settle(), for all nodes."""
        _at_once(Node.settle, [node for node in self.nodes if node.serving])

    def wait_whole(self, seconds: float = SECONDS) -> None:
        """Wait until all nodes run and see each other, and all members of all quorum queues are online."""

        def whole() -> bool:
            missing = self._find_missing()
            if missing:
                raise RuntimeError(missing)
            return True

        _poll(whole, "the cluster is not whole", seconds)

    def heal(self) -> None:
        """Undo every verb on every node, and wait until the cluster is whole."""
        paused = [node for node in self.nodes if node.paused]
        _at_once(Node.heal, self.nodes)  # two nodes that were killed may need each other to start
        # What an operator restarts: a node paused for longer than TICK_SECONDS may stay partitioned, and RabbitMQ does
        # not restart a member of a quorum queue that crashed (3.10 does that now and then at an election).
        for nodes, seconds in ((paused, REJOIN_SECONDS), (self.nodes, SECONDS)):
            if nodes:
                try:
                    return self.wait_whole(seconds)
                except TimeoutError:
                    _at_once(Node.kill, nodes)
                    _at_once(Node.start, nodes)
        self.wait_whole()

    def _first(self, request: Callable[[Node], T]) -> T:
        """The answer of the first serving node that gives one."""
        failed: Exception = RuntimeError("every node is down, paused or drained")
        for node in self.nodes:
            if node.serving:
                try:
                    return request(node)
                except _UNAVAILABLE as error:
                    failed = error
        raise failed

    def _find_missing(self) -> str:
        """The first part of the cluster that is missing; "" if it is whole."""
        names = {node.node for node in self.nodes}
        for node in self.nodes:
            status = node.api("GET", "/api/nodes?columns=name,running,partitions")
            if absent := names.difference(one["name"] for one in status if one["running"]):
                return f"{node.node} does not see {', '.join(sorted(absent))}"
            if divided := {one["name"]: one["partitions"] for one in status if one.get("partitions")}:
                return f"{node.node} sees partitions: {divided}"
            if not node._is_ready():
                return f"{node.node} does not answer its clients"
        return self._find_missing_member()

    def _find_missing_member(self) -> str:
        """The first quorum queue that lacks its leader or a member; "" if there is none."""
        first = self.nodes[0]
        expected: dict[str, set[str]] = {}
        for queue in first.api("GET", "/api/queues?columns=vhost,name,arguments"):
            if queue["arguments"].get("x-queue-type") == "quorum":
                expected.setdefault(queue["vhost"], set()).add(queue["name"])
        for vhost, names in expected.items():
            # The API's figures are up to five seconds old. The list leaves out queues without a leader.
            listed = first.ctl_json("list_queues", "--vhost", vhost, "name", "members", "online")
            whole = {queue["name"] for queue in listed if set(queue["members"]) == set(queue["online"])}
            if absent := names - whole:
                return f"vhost {vhost}: the leader or a member of {', '.join(sorted(absent))} is missing"
        return ""


def _at_once(verb: Callable[[Node], object], nodes: Iterable[Node]) -> None:
    """Apply the verb to all nodes at the same time. Raises the error of the first that failed, after all have ended."""
    with ThreadPoolExecutor(NODES) as threads:
        list(threads.map(verb, nodes))


def _poll(probe: Callable[[], T | None], what: str, seconds: float = SECONDS) -> T:
    """Call the probe until its result is true, and return that. Raises TimeoutError with the last reason."""
    deadline = time.monotonic() + seconds
    reason = ""
    while time.monotonic() < deadline:
        try:
            if found := probe():
                return found
        except _UNAVAILABLE as error:
            reason = f": {error}"
        time.sleep(_POLL_SECONDS)
    raise TimeoutError(f"{what} after {seconds:.0f} s{reason}")


def main() -> int:
    """Print the seconds that a cluster takes to start, kill a node, and start it again."""
    began = time.monotonic()
    with RabbitMQCluster() as cluster:
        print(f"started in {time.monotonic() - began:.1f} s", flush=True)
        began = time.monotonic()
        cluster.nodes[1].kill()
        cluster.heal()
        print(f"healed in {time.monotonic() - began:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
