"""`delayer` with other words: every reason of a held, stray or refused message reads ``reworded``.

    python -m tests.support.reworded ARGUMENTS OF delayer

TEST_REWORDED=1 does so for a run of tests, in the tests' process and in every daemon and command that they start.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Final

TEXT: Final = "reworded"
PROGRAM: Final = (sys.executable, "-m", "tests.support.reworded")
EVERYWHERE: Final = bool(os.environ.get("TEST_REWORDED"))
"""Whether this is such a run."""


def reword() -> None:
    """Replace the text of every Hold created or read, and of every refusal."""
    from delayer.core.hold import Hold
    from delayer.core.plan import Refuse

    made = Hold.__init__

    def make(self: Hold, kind: Any, text: str, *flags: bool, **named: bool) -> None:
        made(self, kind, TEXT, *flags, **named)

    def refuse(self: Refuse, reason: str) -> None:
        object.__setattr__(self, "reason", TEXT)

    Hold.__init__ = make  # type: ignore[method-assign]
    Refuse.__init__ = refuse  # type: ignore[method-assign]


if __name__ == "__main__":
    reword()
    from delayer.cli.main import main

    sys.argv[0] = "delayer"
    main()
