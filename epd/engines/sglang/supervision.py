"""Keeps one SGLang server running: starts it, watches it, starts it again.

A life begins with a process and ends when the process does, or when the server counts as stuck and
is killed. Between two lives there is a wait that doubles with each crash in a row. A server that
says its flags are wrong is not started again, nor one that does not get ready several times over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from epd.clock import Clock
from epd.engines.sglang.health import Progress
from epd.engines.sglang.probe import Probe
from epd.engines.sglang.server import ServerProcess
from epd.errors import ConfigError, WorkerError
from epd.pools.local.backoff import Backoff
from epd.wire import Load

_log = logging.getLogger(__name__)

_SHOW_PROGRESS_S = 10.0
_MAX_SHOWN_CHARS = 140


class Supervision:
    """One server over its lives.

    Args:
        launch: makes the process of a new life, not started.
        probe: asks the server.
        clock: measures lives and silences.
        on_change: called when the server becomes ready, falls silent, and when a life has ended.
        start_s: how long a life may take to get ready.
        stall_s: see `Progress`.
        probe_s: pause between two probes.
        max_failed_starts: give up after so many lives in a row that did not get ready.
        backoff: the wait between lives.
    """

    def __init__(
        self,
        launch: Callable[[], ServerProcess],
        probe: Probe,
        clock: Clock,
        *,
        on_change: Callable[[], None],
        start_s: float,
        stall_s: float,
        probe_s: float = 1.0,
        max_failed_starts: int = 3,
        backoff: Backoff | None = None,
    ) -> None:
        self.num_lives = 0
        self.load = Load()
        self._launch = launch
        self._probe = probe
        self._clock = clock
        self._on_change = on_change
        self._start_s = start_s
        self._stall_s = stall_s
        self._probe_s = probe_s
        self._max_failed_starts = max_failed_starts
        self._backoff = backoff or Backoff()
        self._server: ServerProcess | None = None
        self._is_ready = False
        self._is_stopping = False
        self._ready = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_ready(self) -> bool:
        """Whether the server lives and answered the latest probe."""
        return self._is_ready

    @property
    def pid(self) -> int | None:
        """The server's process id while it runs."""
        return None if self._server is None else self._server.pid

    async def wait_ready(self) -> None:
        """Return when the first life is ready."""
        await self._ready.wait()

    async def run(self) -> None:
        """Keep the server running until `drain`, or until cancelled; then nothing of it is left.

        Raises:
            ConfigError: the server says that it cannot work as it is configured.
            WorkerError: it did not get ready `max_failed_starts` times in a row.
        """
        num_failed_starts = 0
        while not self._is_stopping:
            began_s = self._clock.monotonic()
            got_ready, reason = await self._live()
            if self._is_stopping:
                return
            if isinstance(reason, ConfigError):
                raise reason
            num_failed_starts = 0 if got_ready else num_failed_starts + 1
            if num_failed_starts == self._max_failed_starts:
                raise reason
            delay_s = self._backoff.delay_s(self._clock.monotonic() - began_s)
            _log.error("%s; starting again in %.1f s", reason.message, delay_s)
            await asyncio.sleep(delay_s)

    async def drain(self, drain_s: float) -> None:
        """Let the server finish what runs, for at most `drain_s`, and end it for good."""
        self._is_stopping = True
        server = self._server
        if server is None:
            return
        try:
            async with asyncio.timeout(drain_s):
                await self._idle.wait()
                # Connections that are open are answered before it leaves.
                server.terminate()
                await server.wait()
        except TimeoutError:
            _log.warning("the SGLang server did not finish in drain_s (%.0f s)", drain_s)
        await server.kill()

    async def _live(self) -> tuple[bool, ConfigError | WorkerError]:
        """One life. Returns (whether it got ready, why it ended)."""
        server = self._server = self._launch()
        self.num_lives += 1
        got_ready = False
        await server.start()
        ended = asyncio.create_task(server.wait())
        try:
            fault = await self._until_ready(server, ended)
            if fault is None:
                got_ready = True
                self._set_ready(True)
                self._ready.set()
                fault = await self._watch(ended)
            if not ended.done():
                return got_ready, WorkerError(f"the SGLang server is killed: {fault}")
            return got_ready, server.failure(ended.result())
        finally:
            ended.cancel()
            await server.kill()
            self._server = None
            self._take_load(Load())
            self._is_ready = False
            self._on_change()

    async def _until_ready(self, server: ServerProcess, ended: asyncio.Task[int]) -> str | None:
        """None once ready; else why not."""
        began_s = shown_s = self._clock.monotonic()
        while not ended.done():
            if await self._probe.is_ready():
                _log.info(
                    "the SGLang server was ready in %.0f s", self._clock.monotonic() - began_s
                )
                return None
            now_s = self._clock.monotonic()
            if now_s - began_s > self._start_s:
                return f"not ready after start_s ({self._start_s:.0f} s)"
            if now_s - shown_s >= _SHOW_PROGRESS_S:
                shown_s = now_s
                line = server.last_line()[:_MAX_SHOWN_CHARS]
                _log.info("the SGLang server starts since %.0f s: %s", now_s - began_s, line)
            await asyncio.wait([ended], timeout=self._probe_s)
        return "it ended"

    async def _watch(self, ended: asyncio.Task[int]) -> str:
        """Probe until the end or a fault, which is returned."""
        progress = Progress(self._stall_s, self._clock.monotonic(), Load())
        while not ended.done():
            answered, body = await self._probe.ask()
            now_s = self._clock.monotonic()
            if answered:
                progress.answered(body, now_s)
            else:
                progress.silent(now_s)
            self._take_load(progress.load)
            self._set_ready(progress.is_responsive and not ended.done())
            if progress.fault is not None:
                return progress.fault
            await asyncio.wait([ended], timeout=self._probe_s)
        return "it ended"

    def _take_load(self, load: Load) -> None:
        self.load = load
        if load.num_running_reqs or load.num_waiting_reqs:
            self._idle.clear()
        else:
            self._idle.set()

    def _set_ready(self, is_ready: bool) -> None:
        if is_ready is not self._is_ready:
            self._is_ready = is_ready
            self._on_change()
