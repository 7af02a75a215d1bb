"""The entry script for spark-submit: the same command line as ``delayer``, with the JVM and the master of spark-submit.

    spark-submit --master yarn $(python -c 'import delayer.cli.submit as s; print(s.__file__)') audit --work hdfs://…

spark-submit prints on stdout what this writes to stderr, too. With --json the report is the line that begins with {.

The Python of driver and executors (``PYSPARK_PYTHON``) needs delayer[spark] installed; docs/backlog.md says how.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # A script's directory is first on the path, but other packages must not import its modules (check, run, …).
    here = str(Path(__file__).resolve().parent)
    sys.path[:] = [entry for entry in sys.path if entry != here]

    from delayer.cli.main import main

    main()
