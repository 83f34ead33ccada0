"""Many simulated workers in one event loop, each with a port, a lease and faults of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from types import TracebackType

from epd.auth import ClusterToken
from epd.clock import Clock, SystemClock
from epd.config import WorkerConfig
from epd.engines.sim.life import Surroundings
from epd.engines.sim.pace import Sleep
from epd.engines.sim.profile import Profile
from epd.engines.sim.run import open_session
from epd.engines.sim.worker import SimWorker
from epd.types import Stage


class SimFleet:
    """An async context manager: inside, the workers serve on loopback ports.

    Workers are named `encode-0`, `encode-1`, … as those of `epd up` are:

        async with SimFleet(url, token, {Stage.ENCODE: 24, Stage.PREFILL: 16}) as fleet:
            await fleet.wait_registered(timeout_s=10)
            fleet["encode-3"].faults.add(Fault(kind="hang"))
    """

    def __init__(
        self,
        coordinator: str,
        token: ClusterToken,
        num_workers: Mapping[Stage, int],
        *,
        profile: Profile | None = None,
        model_id: str = "sim",
        clock: Clock | None = None,
        sleep: Sleep = asyncio.sleep,
        request_timeout_s: float = 60.0,
    ) -> None:
        """Describe a fleet; nothing is started yet.

        Args:
            coordinator: its URL.
            token: the cluster's.
            num_workers: of each stage.
            profile: of all workers; the default one if not given.
            model_id: the name clients use.
            clock: of leases, spans and simulated work.
            sleep: waits for seconds of `clock`.
            request_timeout_s: how long one wait inside a worker may last.
        """
        self._token = token
        self._profile = profile or Profile()
        self._clock = clock or SystemClock()
        self._sleep = sleep
        self._configs = [
            WorkerConfig(
                stage=stage,
                model=model_id,
                coordinator=coordinator,
                engine="sim",
                worker_id=f"{stage}-{number}",
                request_timeout_s=request_timeout_s,
            )
            for stage, count in num_workers.items()
            for number in range(count)
        ]
        self._workers: dict[str, SimWorker] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> SimFleet:
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(open_session())
            surroundings = Surroundings(self._token, session, self._clock, self._sleep)
            stack.push_async_callback(self._stop)
            for config in self._configs:
                worker = SimWorker(config, self._profile, surroundings)
                await worker.start()
                self._workers[worker.identity.worker_id] = worker
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    def __getitem__(self, worker_id: str) -> SimWorker:
        return self._workers[worker_id]

    def __len__(self) -> int:
        return len(self._workers)

    def of(self, stage: Stage) -> list[SimWorker]:
        """The workers of a stage, dead ones included."""
        return [worker for worker in self._workers.values() if worker.config.stage is stage]

    async def wait_registered(self, timeout_s: float) -> None:
        """Return when the coordinator has granted every living worker a lease.

        Raises:
            TimeoutError: not within `timeout_s`.
        """
        async with asyncio.timeout(timeout_s):
            for worker in self._workers.values():
                if worker.is_alive:
                    await worker.shell.lease.wait_grant()

    async def _stop(self) -> None:
        await asyncio.gather(*(worker.stop() for worker in self._workers.values()))
        self._workers.clear()
