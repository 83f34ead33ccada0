"""Faults on command: what is to go wrong at a simulated worker, and how it goes wrong.

A fault strikes calls of the worker's stage; liveness, load and metrics are left alone, as they are
when only the engine behind a server fails. Given by `POST /sim/faults` or by `Faults.add`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Literal

from aiohttp import web
from aiohttp.typedefs import Middleware
from pydantic import BaseModel, ConfigDict, Field, model_validator

from epd.engines.shell.middleware import Handler
from epd.errors import BadRequestError, EPDError
from epd.wire import parse


class Fault(BaseModel):
    """One thing that goes wrong, until it is cleared, used up or over."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["die", "hang", "slow", "error", "cut", "refuse"]
    """die: the process is gone, without goodbye. hang: calls get no answer. slow: they take
    `factor` times as long. error: they are answered 500. cut: their connections are broken.
    refuse: new connections are refused, idle ones closed."""
    call: str | None = None
    """Strike this call only, such as /send; any call of the stage if None."""
    num_requests: int | None = Field(default=None, ge=1)
    """Strike so many calls; all until cleared if None."""
    for_s: float | None = Field(default=None, gt=0)
    """The fault clears itself after so many real seconds."""
    after_tokens: int = Field(default=0, ge=0)
    """decode: strike when so many tokens of the answer are there; 0 strikes on arrival."""
    factor: float = Field(default=10.0, gt=0)
    """slow: how many times as long."""

    @property
    def is_of_worker(self) -> bool:
        """Whether it befalls the worker at once instead of striking a call."""
        names_a_call = self.call or self.num_requests or self.after_tokens
        return self.kind == "refuse" or (self.kind == "die" and not names_a_call)

    @model_validator(mode="after")
    def _makes_sense(self) -> Fault:
        if self.kind == "refuse" and (self.call or self.num_requests or self.after_tokens):
            raise ValueError("refuse concerns all connections: give at most for_s")
        if self.kind == "slow" and self.after_tokens:
            raise ValueError("slow concerns a whole call: leave after_tokens out")
        if self.kind != "slow" and "factor" in self.model_fields_set:
            raise ValueError(f"{self.kind} has no factor: only slow has")
        return self


@dataclass(slots=True, eq=False)
class _Active:
    fault: Fault
    num_left: int | None
    over: asyncio.Event = field(default_factory=asyncio.Event)
    timer: asyncio.TimerHandle | None = None


class Faults:
    """The faults of one worker.

    Args:
        calls: the paths of the stage's calls, with `{room}` for what differs.
        die: ends the worker as a crash would; calls in progress are cancelled by it.
        refuse: closes (True) or opens (False) the worker's listening socket.
    """

    def __init__(
        self,
        calls: Collection[str],
        *,
        die: Callable[[], None],
        refuse: Callable[[bool], None],
    ) -> None:
        self._calls = frozenset(calls)
        self._die = die
        self._refuse = refuse
        self._active: list[_Active] = []
        self._later: dict[int, _Active] = {}
        """Calls in progress that are slow, or struck in the middle, by the id of their request."""
        self.num_struck = 0
        """Calls that a fault has struck."""

    @property
    def active(self) -> list[Fault]:
        """What may still strike, in the order given."""
        return [active.fault for active in self._active if active.num_left != 0]

    def add(self, fault: Fault) -> None:
        """Let `fault` strike from now on; of several, the earliest given strikes a call.

        Raises:
            BadRequestError: the stage has no such call.
        """
        if fault.call is not None and fault.call not in self._calls:
            raise BadRequestError(
                f"call: this stage has no {fault.call}, only {', '.join(sorted(self._calls))}",
                param="call",
            )
        if fault.kind == "die" and fault.is_of_worker:
            self._die()
            return
        active = _Active(fault, fault.num_requests)
        if fault.kind == "refuse":
            self._refuse(True)
        if fault.for_s is not None:
            loop = asyncio.get_running_loop()
            active.timer = loop.call_later(fault.for_s, self._end, active)
        self._active.append(active)

    def clear(self) -> None:
        """End all faults; calls that hang go on."""
        for active in list(self._active):
            self._end(active)

    def close(self) -> None:
        """The worker is gone: no timer of a fault may touch it any more."""
        for active in self._active:
            if active.timer is not None:
                active.timer.cancel()
        self._active.clear()

    def middleware(self) -> Middleware:
        """What every call passes through."""

        @web.middleware
        async def inject(request: web.Request, handler: Handler) -> web.StreamResponse:
            resource = request.match_info.route.resource
            active = self._take(resource.canonical if resource else request.path)
            if active is None:
                return await handler(request)
            if active.fault.kind != "slow" and not active.fault.after_tokens:
                await self._strike(active, request)
                return await handler(request)
            self._later[id(request)] = active
            try:
                return await handler(request)
            finally:
                self._later.pop(id(request), None)

        return inject

    def slow_factor(self, request: web.Request) -> float:
        """How many times as long as usual this call takes."""
        active = self._later.get(id(request))
        return active.fault.factor if active is not None and active.fault.kind == "slow" else 1.0

    def strikes_at(self, request: web.Request) -> int | None:
        """The number of tokens for which a fault of this call waits; None if there is none."""
        active = self._later.get(id(request))
        return active.fault.after_tokens or None if active is not None else None

    async def strike_after(self, request: web.Request, num_tokens: int) -> None:
        """Called when an answer has `num_tokens`; a fault that waited for them strikes now."""
        if (at := self.strikes_at(request)) is not None and num_tokens >= at:
            await self._strike(self._later.pop(id(request)), request)

    def _take(self, call: str) -> _Active | None:
        if call not in self._calls:
            return None
        for active in list(self._active):
            fault = active.fault
            if fault.kind != "refuse" and fault.call in (None, call) and active.num_left != 0:
                self.num_struck += 1
                if active.num_left is not None:
                    active.num_left -= 1
                    if not active.num_left and fault.kind != "hang":  # which `clear` must find
                        self._end(active)
                return active
        return None

    async def _strike(self, active: _Active, request: web.Request) -> None:
        """Returns if the call is to go on."""
        match active.fault.kind:
            case "hang":
                await active.over.wait()
            case "error":
                raise EPDError("an injected fault")
            case "die":
                self._die()
                await _until_cancelled()
            case _:
                if request.transport is not None:
                    request.transport.abort()
                await _until_cancelled()

    def _end(self, active: _Active) -> None:
        if active not in self._active:
            return
        self._active.remove(active)
        active.over.set()
        if active.timer is not None:
            active.timer.cancel()
        is_refusing = any(other.fault.kind == "refuse" for other in self._active)
        if active.fault.kind == "refuse" and not is_refusing:
            self._refuse(False)


async def _until_cancelled() -> None:
    """The server cancels a handler whose connection is gone."""
    await asyncio.Event().wait()


class FaultEndpoints:
    """Control by HTTP, with the cluster token as everything at a worker."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/sim/faults", self.show),
            web.post("/sim/faults", self.add),
            web.delete("/sim/faults", self.clear),
        ]

    async def show(self, request: web.Request) -> web.Response:
        return web.json_response(self._document())

    async def add(self, request: web.Request) -> web.Response:
        """One more fault."""
        fault = parse(Fault, await request.read())
        if fault.kind == "refuse" and fault.for_s is None:
            raise BadRequestError(
                "for_s: refuse needs it here, since no call to clear it would get through",
                param="for_s",
            )
        self._faults.add(fault)
        return web.json_response(self._document())

    async def clear(self, request: web.Request) -> web.Response:
        self._faults.clear()
        return web.json_response(self._document())

    def _document(self) -> dict[str, Any]:
        return {
            "faults": [fault.model_dump(exclude_defaults=True) for fault in self._faults.active],
            "num_struck": self._faults.num_struck,
        }
