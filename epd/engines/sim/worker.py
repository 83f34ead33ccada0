"""One simulated worker: started, stopped, killed, started again, in this process's event loop.

`run.py` runs one for `epd launch`, `fleet.py` hundreds side by side.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from aiohttp import web

from epd.background import log_crash
from epd.config import WorkerConfig
from epd.engines.run import drain
from epd.engines.shell import Identity, Lifecycle, Shell, StageWorker
from epd.engines.sim.faults import Faults
from epd.engines.sim.life import Life, Surroundings, begin_life
from epd.engines.sim.profile import Profile
from epd.errors import WorkerError
from epd.types import Stage, WorkerState

CALLS: dict[Stage, tuple[str, ...]] = {
    Stage.ENCODE: ("/encode", "/scheduler_receive_meta_data", "/send"),
    Stage.PREFILL: (
        "/v1/chat/completions",
        "/bootstrap/rooms/{room}",
        "/bootstrap/rooms/{room}/send",
    ),
    Stage.DECODE: ("/v1/chat/completions",),
}
"""What a fault can strike."""


class SimWorker:
    """One worker over all its lives.

    Args:
        config: its stage, name, address and coordinator; `model` is only a name.
        profile: how fast it is and how much it holds.
        surroundings: what it shares with others.
        die: what the fault of that name does; `kill` if not given.

    Attributes:
        faults: what is to go wrong; see `Faults.add`.
    """

    def __init__(
        self,
        config: WorkerConfig,
        profile: Profile,
        surroundings: Surroundings,
        *,
        die: Callable[[], None] | None = None,
    ) -> None:
        self.config = config
        self.faults = Faults(CALLS[config.stage], die=die or self.kill, refuse=self._refuse)
        self._profile = profile
        self._surroundings = surroundings
        self._life: Life | None = None
        self._door = asyncio.Lock()
        self._is_refusing = False
        self._closed_door: socket.socket | None = None
        """Keeps the port while connections are refused."""
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_alive(self) -> bool:
        return self._life is not None

    @property
    def is_listening(self) -> bool:
        """Whether it takes connections."""
        return self._life is not None and self._closed_door is None

    @property
    def stage(self) -> StageWorker:
        """The present life's. Raises WorkerError if there is none."""
        return self._present.stage

    @property
    def shell(self) -> Shell:
        """The present life's. Raises WorkerError if there is none."""
        return self._present.shell

    @property
    def identity(self) -> Identity:
        """The present life's. Raises WorkerError if there is none."""
        return self._present.shell.identity

    async def start(self, lifecycle: Lifecycle | None = None) -> None:
        """Listen, register and take work; after `kill` as a new process would, with a new epoch.

        Raises:
            ConfigError: the address cannot be used.
        """
        assert self._life is None, "started twice"
        await self._settle()
        self._life = await begin_life(
            self.config, self._profile, self._surroundings, self.faults, lifecycle or Lifecycle()
        )

    async def stop(self, drain_s: float = 0.0) -> None:
        """Leave in order: finish what runs, for at most `drain_s`, and say goodbye."""
        life = self._life
        if life is not None:
            lifecycle = life.shell.lifecycle
            lifecycle.move(WorkerState.DRAINING)
            if drain_s:
                await drain(life.shell, life.stage, drain_s)
        # Unless it was killed meanwhile.
        life, self._life = self._life, None
        if life is not None:
            self.faults.close()
            life.shell.lifecycle.move(WorkerState.GONE)
            await life.end()
            await life.shell.lease.say_goodbye()
        await self._settle()

    def kill(self) -> None:
        """Be gone as after a crash: connections break, and nobody is told."""
        life, self._life = self._life, None
        if life is not None:
            self.faults.close()
            life.break_connections()
            life.shell.lifecycle.move(WorkerState.GONE)
            self._spawn(life.end())

    @property
    def _present(self) -> Life:
        if self._life is None:
            raise WorkerError(f"{self.config.worker_id or self.config.stage} is not running")
        return self._life

    def _refuse(self, is_refusing: bool) -> None:
        self._is_refusing = is_refusing
        self._spawn(self._move_door())

    async def _move_door(self) -> None:
        """Close or open the listening socket, whichever is wanted by now."""
        async with self._door:
            life = self._life
            if life is None:
                return
            if self._is_refusing and self._closed_door is None:
                await life.close_listener()
                self._closed_door = _keep_port(*life.address)
                life.close_idle_connections()
            elif not self._is_refusing and self._closed_door is not None:
                life.listener, self._closed_door = self._closed_door, None
                await web.SockSite(life.runner, life.listener).start()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name=f"{self.config.worker_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(log_crash)

    async def _settle(self) -> None:
        """Wait until nothing of an earlier life is left."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        self._is_refusing = False
        if self._closed_door is not None:
            self._closed_door.close()
            self._closed_door = None


def _keep_port(host: str, port: int) -> socket.socket:
    """A socket that has the port and does not listen: the kernel refuses who connects."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    keeper = socket.socket(family, socket.SOCK_STREAM)
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    keeper.bind((host, port))
    keeper.setblocking(False)
    return keeper
