"""How a process that has torch and Mooncake in it ends, once its work has ended in order."""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn


def leave() -> NoReturn:
    """End the process with exit code 0, at once.

    Python would take its modules apart first: 2 s for torch and transformers and 1 s for Mooncake's
    threads on an idle machine, 10 s in all on a loaded one (two cores, December 2026). It would
    also wait for what still computes. All that they hold goes with the process.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
