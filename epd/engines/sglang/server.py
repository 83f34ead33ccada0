"""One life of an SGLang server: a process group, its log file, and the words it left with."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from epd.engines.sglang.environment import EXIT_USAGE, PARENT_VARIABLE
from epd.errors import ConfigError, WorkerError

_KEEP_BYTES = 64 * 2**20
_TAIL_BYTES = 16 * 2**10
_WORDS = ("error", "exception", "epd:", "refus", "cannot", "no such", "not supported")


class ServerProcess:
    """The server's process. It writes straight to its log: no pipe of ours can hold it up.

    Args:
        argv: the command.
        environment: added to this process's own.
        log: where the output goes; the file of the last life is kept as `NAME.1` once it is large.
    """

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._argv = tuple(argv)
        self._environment = environment
        self._log = log
        self._log_start = 0
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """The process id, which is also the group's, once started."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the process.

        Raises:
            ConfigError: the log cannot be written, or the command is not there.
        """
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            if self._log.exists() and self._log.stat().st_size > _KEEP_BYTES:
                self._log.replace(self._log.with_name(f"{self._log.name}.1"))
            # Prompts are not logged, but paths and addresses are.
            descriptor = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as exc:
            raise ConfigError(f"server_log {self._log} cannot be written: {exc.strerror}") from exc
        try:
            self._log_start = os.fstat(descriptor).st_size
            self._process = await asyncio.create_subprocess_exec(
                *self._argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
                env={**os.environ, **self._environment, PARENT_VARIABLE: str(os.getpid())},
                start_new_session=True,
            )
        except OSError as exc:
            raise ConfigError(f"cannot start {self._argv[0]}: {exc}") from exc
        finally:
            os.close(descriptor)

    async def wait(self) -> int:
        """Wait for the process to end; returns its exit code (negative: a signal)."""
        assert self._process is not None, "the server was not started"
        return await self._process.wait()

    def terminate(self) -> None:
        """Ask the server to finish what runs and leave."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    async def kill(self) -> None:
        """End the whole group; on return nothing of it runs."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()

    def last_line(self) -> str:
        """The newest line of this life's output."""
        lines = self._tail()
        return lines[-1] if lines else ""

    def failure(self, code: int) -> ConfigError | WorkerError:
        """What the end with exit code `code` means, in one line with the server's own words."""
        words = self._last_words()
        if code == EXIT_USAGE:
            return ConfigError(words.removeprefix("epd: "))
        ending = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return WorkerError(f"the SGLang server {ending}: {words} (log: {self._log})")

    def _last_words(self) -> str:
        """The last line that names an error; else the last line."""
        lines = self._tail()
        for line in reversed(lines):
            if any(word in line.lower() for word in _WORDS):
                return line.strip()
        return lines[-1].strip() if lines else "it left without a word"

    def _tail(self) -> list[str]:
        try:
            with self._log.open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(self._log_start, end - _TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except OSError:
            return []
        return [line for line in text.splitlines() if line.strip()]
