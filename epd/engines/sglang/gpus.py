"""Claims of GPUs: two workers on one host must not be given the same GPU.

A claim is a lock on a file, which the kernel drops when the process dies in whatever way.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path

from epd.errors import ConfigError


def default_folder() -> Path:
    """Where the claims of this user's workers are."""
    return Path(tempfile.gettempdir()) / f"epd-gpus-{os.getuid()}"


@contextlib.contextmanager
def claim(gpus: Sequence[int], *, folder: Path | None = None) -> Generator[None]:
    """Hold `gpus` for this process while inside.

    Raises:
        ConfigError: another worker on this host holds one of them; it is named.
    """
    folder = folder or default_folder()
    with contextlib.ExitStack() as held:
        for gpu in gpus:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = held.enter_context((folder / f"gpu-{gpu}.lock").open("a+"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                owner = file.read().strip() or "unknown"
                raise ConfigError(
                    f"GPU {gpu} is used by another EPD worker on this host (process {owner}): "
                    "give each worker GPUs of its own"
                ) from None
            file.seek(0)
            file.truncate()
            file.write(str(os.getpid()))
            file.flush()
        yield
