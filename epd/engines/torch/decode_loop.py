"""Continuous batching: every running sequence gets one token per step.

Any sequence may join or leave between two steps.
The steps run in the compute thread without coming back to the event loop in between; tokens are
posted to the loop as they come, so that sending them overlaps the next step.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from epd.clock import Clock
from epd.engines.shell import ComputeThread, WorkerMetrics
from epd.engines.torch.engine import DecodeBatch, DecodeSlot
from epd.errors import DeadlineError, EPDError, WorkerError

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Running:
    """One sequence in the loop, from `join` until it has left."""

    slot: DecodeSlot
    num_remaining: int
    """Tokens still to compute; the compute thread counts it down."""
    on_left: Callable[[], None]
    wants_to_leave: bool = False
    tokens: asyncio.Queue[int | EPDError] = field(default_factory=asyncio.Queue[int | EPDError])

    async def next_token(self, timeout_s: float) -> int:
        """The next token; after an end-of-sequence token or the last one none follows.

        Raises:
            DeadlineError: none came in `timeout_s`.
            EPDError: the computation failed.
        """
        try:
            async with asyncio.timeout(timeout_s):
                token = await self.tokens.get()
        except TimeoutError:
            raise DeadlineError(f"decode computed nothing for {timeout_s:g} s") from None
        if isinstance(token, EPDError):
            raise token
        return token

    def leave(self) -> None:
        """Stop soon; `on_left` is called when the slot's blocks are not used any more."""
        self.wants_to_leave = True


class DecodeLoop:
    """The running batch, and those that wait for a place in it."""

    def __init__(
        self,
        batch: DecodeBatch,
        *,
        compute: ComputeThread,
        clock: Clock,
        metrics: WorkerMetrics,
        eos_token_ids: Collection[int],
        max_running: int,
    ) -> None:
        self._batch = batch
        self._compute = compute
        self._clock = clock
        self._metrics = metrics
        self._eos_token_ids = eos_token_ids
        self._max_running = max_running
        self._lock = threading.Lock()  # guards the next four against the two threads
        self._joining: deque[Running] = deque()
        self._running: list[Running] = []
        self._is_active = False
        self._is_closed = False
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._joining)

    def join(self, slot: DecodeSlot, num_tokens: int, on_left: Callable[[], None]) -> Running:
        """Compute up to `num_tokens` (at least 1) tokens that follow the slot's newest.

        `on_left` is called once, on the event loop, when the slot's blocks are free to reuse:
        after the last token, an error, or `Running.leave`.
        """
        running = Running(slot, num_tokens, on_left)
        with self._lock:
            if self._is_closed:
                raise WorkerError("the decode worker stops")
            self._joining.append(running)
            is_started = self._is_active
            self._is_active = True
        if not is_started:
            self._task = asyncio.create_task(self._compute.run(self._run), name="decode loop")
        return running

    async def close(self) -> None:
        """Let everybody go and wait until the thread has stopped stepping."""
        with self._lock:
            self._is_closed = True
            for running in (*self._joining, *self._running):
                running.wants_to_leave = True
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    def _run(self) -> None:
        """In the compute thread: step until nobody is left."""
        while self._admit():
            self._compute.beat()
            try:
                self._step()
            except Exception as exc:
                # A step computes all sequences together, so all of them have lost their place.
                _log.exception("a decode step failed")
                error = WorkerError(f"the decode step failed: {type(exc).__name__}")
                self._post([(running, error) for running in self._running], self._running)
                with self._lock:
                    self._running = []

    def _admit(self) -> bool:
        """Between two steps: who wants to leave goes, who waits comes in; whether anybody runs."""
        with self._lock:
            left = [r for r in (*self._running, *self._joining) if r.wants_to_leave]
            self._running = [r for r in self._running if not r.wants_to_leave]
            self._joining = deque(r for r in self._joining if not r.wants_to_leave)
            while self._joining and len(self._running) < self._max_running:
                self._running.append(self._joining.popleft())
            self._is_active = bool(self._running)
        if left:
            self._post([], left)
        return self._is_active

    def _step(self) -> None:
        began_s = self._clock.monotonic()
        token_ids = self._batch.step([running.slot for running in self._running])
        self._metrics.step_seconds.labels("decode").observe(self._clock.monotonic() - began_s)
        results: list[tuple[Running, int | EPDError]] = []
        ended: list[Running] = []
        for running, token_id in zip(self._running, token_ids, strict=True):
            results.append((running, token_id))
            running.num_remaining -= 1
            if not running.num_remaining or token_id in self._eos_token_ids:
                ended.append(running)
        with self._lock:
            self._running = [running for running in self._running if running not in ended]
        self._post(results, ended)

    def _post(self, results: list[tuple[Running, int | EPDError]], left: list[Running]) -> None:
        """Hand tokens, and the sequences that have left, to the event loop."""
        try:
            self._loop.call_soon_threadsafe(_deliver, results, left)
        except RuntimeError:
            _log.debug("the event loop has ended before the decode loop")


def _deliver(results: list[tuple[Running, int | EPDError]], left: list[Running]) -> None:
    for running, token in results:
        running.tokens.put_nowait(token)
    for running in left:
        running.on_left()
