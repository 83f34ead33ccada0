"""Ties a process to the life of its parent, so that a killed worker leaves no server behind.

`python -m epd.engines.sglang.parent PARENT_PID COMMAND...` becomes COMMAND, tied in the same way.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int | None = None) -> None:
    """Have the kernel kill this process when its parent dies; leave now if that has happened."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(1)


def main() -> None:
    """Tie this process to its parent and become the command."""
    parent_pid, *command = sys.argv[1:]
    die_with_parent(int(parent_pid))
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
