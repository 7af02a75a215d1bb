"""Carry out the runbooks of docs/operations.md: all, or those that are named."""

from __future__ import annotations

import os
import sys

from tests.runbooks import brokers, destinations, stores
from tests.runbooks.carrying import Steps, asked, carry_out

APART = "RUNBOOKS_APART"
"""Set where we are in a mount namespace of our own. For root only."""
RUNBOOKS: Steps = {
    "stuck-destination": destinations.stuck_destination,
    "postgres-failover": stores.postgres_failover,
    "backup-and-restore": stores.backup_and_restore,
    "broker-upgrade": brokers.broker_upgrade,
    "flood": destinations.flood,
    "disk-full": stores.disk_full,
    "broker-disk-full": brokers.broker_disk_full,
    "another-broker": brokers.another_broker,
    "disaster-recovery": stores.disaster_recovery,
}


def main() -> int:
    names = asked("tests.runbooks", __doc__, RUNBOOKS)
    if APART not in os.environ:
        # What is mounted (a disk to fill) goes with the processes, however they end.
        argv = ["unshare", "--mount", sys.executable, "-m", "tests.runbooks", *sys.argv[1:]]
        os.execvpe(argv[0], argv, os.environ | {APART: "1"})
    for name in names:
        carry_out(name, RUNBOOKS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
