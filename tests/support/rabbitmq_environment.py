"""The environment of a RabbitMQ of our own, by which it finds its files and ports and nobody else's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.support import ports
from tests.support.processes import clean_environment


def environment(at: Path, node: str, numbers: Mapping[str, int], hidden: Mapping[str, int]) -> dict[str, str]:
    """``at``: its directory, as it sees it. ``numbers``: of its ports, by whose they are. ``hidden``: settings that
    rabbitmq.conf has no lines for."""
    # Two schedulers are plenty for tests, and on small machines idle ones must not spin.
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
