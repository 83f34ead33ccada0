"""One supervised process: started, watched, started again after a crash, stopped.

It owns the process and its group: nothing of the group is left once `run` returns or is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import BinaryIO

from epd.background import log_crash
from epd.clock import Clock, SystemClock
from epd.errors import ConfigError, WorkerError
from epd.pools.local.backoff import Backoff
from epd.pools.local.logs import Log
from epd.types import Stage

logger = logging.getLogger(__name__)

EXIT_USAGE = 2
"""How `epd` commands leave when their configuration cannot work: restarting would not help."""
_LAST_LINES = 20
_FLUSH_S = 1.0
_MAX_LINE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run; `stage` is None for the coordinator."""

    name: str
    argv: tuple[str, ...]
    stage: Stage | None = None
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Added to this process's environment."""


class Child:
    """A process under supervision.

    Args:
        spec: what to run.
        log: takes its output and what happens to it.
        max_crashes: give up after so many; never if None.
        backoff: how long to wait before each new start.
        clock: measures how long the process ran.
    """

    def __init__(
        self,
        spec: ChildSpec,
        log: Log,
        *,
        max_crashes: int | None = None,
        backoff: Backoff | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.spec = spec
        self._max_crashes = max_crashes
        self.num_starts = 0
        self.last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._log = log
        self._backoff = backoff or Backoff()
        self._clock = clock or SystemClock()
        self._stop_asked = asyncio.Event()
        self._is_killed = False
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """The process id while the process runs."""
        return self._process.pid if self._process else None

    async def run(self) -> None:
        """Run the process, again after each crash, until `terminate` or `kill`.

        Raises:
            ConfigError: the process says its configuration cannot work; the message is its own.
            WorkerError: it crashed `max_crashes` times.
        """
        num_crashes = 0
        while not self._stop_asked.is_set():
            started_s = self._clock.monotonic()
            code = await self._run_once()
            if self._stop_asked.is_set():
                return
            if code == EXIT_USAGE:
                raise ConfigError(f"{self.spec.name}: {self._last_line()}")
            num_crashes += 1
            if num_crashes == self._max_crashes:
                raise WorkerError(f"{self.spec.name} {_ending(code)}: {self._last_line()}")
            delay_s = self._backoff.delay_s(self._clock.monotonic() - started_s)
            self._write(f"{_ending(code)}; starting again in {delay_s:.1f} s")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._stop_asked.wait()

    def terminate(self) -> None:
        """Ask the process to finish its work and leave; it is not started again."""
        self._stop_asked.set()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    def kill(self) -> None:
        """End the process and its group at once; it is not started again."""
        self._stop_asked.set()
        self._is_killed = True
        if self._process is not None:
            _kill_group(self._process.pid)

    async def _run_once(self) -> int:
        """Start the process and wait for its end; returns its exit code (negative: a signal)."""
        # Our own pipe: asyncio's would make `wait` hang on a grandchild that keeps it open.
        read_end, write_end = os.pipe()
        output = os.fdopen(read_end, "rb", buffering=0)
        try:
            process = await asyncio.create_subprocess_exec(
                *self.spec.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                env={**os.environ, **self.spec.env},
                # Ctrl-C in the terminal must reach us alone: we stop the children in order.
                start_new_session=True,
            )
        except OSError as exc:
            output.close()
            raise ConfigError(f"{self.spec.name}: cannot start {self.spec.argv[0]}: {exc}") from exc
        finally:
            os.close(write_end)
        self._process = process
        self.num_starts += 1
        relay = asyncio.create_task(self._relay(output), name=f"output of {self.spec.name}")
        relay.add_done_callback(log_crash)
        try:
            # Asked while the process was being made, when there was nothing to signal yet.
            if self._is_killed:
                self.kill()
            elif self._stop_asked.is_set():
                self.terminate()
            return await process.wait()
        finally:
            # The leader is gone or must go, and what it started goes with it.
            _kill_group(process.pid)
            self._process = None
            await asyncio.wait([relay], timeout=_FLUSH_S)
            relay.cancel()
            await asyncio.gather(relay, return_exceptions=True)
            output.close()

    async def _relay(self, output: BinaryIO) -> None:
        """Pass the process's output on, line by line, until it is closed."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), output
        )
        try:
            pending = b""
            while chunk := await reader.read(_MAX_LINE_BYTES):
                *lines, pending = (pending + chunk).split(b"\n")
                for line in lines:
                    self._write(line.decode(errors="replace").rstrip("\r"))
                if len(pending) > _MAX_LINE_BYTES:
                    self._write(pending.decode(errors="replace"))
                    pending = b""
            if pending:
                self._write(pending.decode(errors="replace"))
        finally:
            transport.close()

    def _write(self, line: str) -> None:
        self.last_lines.append(line)
        try:
            self._log.write(self.spec.name, self.spec.stage, line)
        except OSError as exc:
            # A full disk or a closed terminal must not take the deployment down.
            logger.warning("cannot write the output of %s: %s", self.spec.name, exc)

    def _last_line(self) -> str:
        lines = [line for line in self.last_lines if line.strip()]
        return lines[-1].removeprefix("epd: ") if lines else "it left without a word"


def _kill_group(pid: int) -> None:
    """SIGKILL to the process group that `pid` leads; start_new_session made it a leader."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _ending(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
