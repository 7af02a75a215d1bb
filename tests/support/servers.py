"""Private servers for tests, the demo and development.

`python -m tests.support.servers` starts both, prints where they are and keeps them up until Ctrl-C.
"""

from __future__ import annotations

import signal
import sys

from tests.support.postgres import Postgres
from tests.support.processes import StartFailed
from tests.support.rabbitmq import Certificates, RabbitMQ

__all__ = ["Certificates", "Postgres", "RabbitMQ", "StartFailed"]


def main() -> int:
    signals = {signal.SIGINT, signal.SIGTERM}
    with RabbitMQ() as rabbitmq, Postgres() as postgres:
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        print(f"broker      {rabbitmq.url()}")
        print(f"management  {rabbitmq.management_url}")
        print(f"store       {postgres.url()}")
        print("Ctrl-C ends both and deletes their data.", flush=True)
        signal.sigwait(signals)
    return 0


if __name__ == "__main__":
    sys.exit(main())
