"""Coming from another system, and going back to it: the steps of docs/coming-from.md, carried out.

`python -m tests.runbooks.coming [NAME …]`. The plugin's needs the
plugin: RUNBOOKS_PLUGINS names the directory that it is in, unpacked or as a file .ez.
"""

from __future__ import annotations

import os
import sys

from tests.runbooks import old_brokers, old_worlds
from tests.runbooks.carrying import Steps, asked, carry_out

STEPS: Steps = {
    "celery": old_worlds.celery,
    "plugin": old_brokers.plugin,
    "mailerq": old_worlds.mailerq,
    "hold-queues": old_brokers.hold_queues,
}


def main() -> int:
    names = asked("tests.runbooks.coming", __doc__, STEPS)
    for name in names:
        if name == "plugin" and old_brokers.PLUGINS not in os.environ:
            print(f"== {name}: left out, {old_brokers.PLUGINS} names no directory with the plugin", flush=True)
            continue
        carry_out(name, STEPS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
