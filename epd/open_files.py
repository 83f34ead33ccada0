"""How many files, and so connections, a process may have open. For every long-lived process."""

from __future__ import annotations

import contextlib
import resource

_ENOUGH = 65_536


def raise_open_files_limit() -> None:
    """Raise the soft limit, often 1024, towards the hard one.

    A request in flight takes several connections. At the limit a server accepts none and logs an
    error at each try.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(_ENOUGH, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # a sandbox may refuse
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
