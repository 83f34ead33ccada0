"""The requests a worker is busy with, and how one is aborted.

Each handler runs inside a `RequestScope`. Aborting a request cancels the handlers of its rid, and
each ends with `AbortedError` rather than a bare cancellation, so that a peer that is still there
gets an answer. A handler whose peer has left is cancelled by the HTTP server instead.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from types import TracebackType

from epd.clock import Clock
from epd.errors import AbortedError

_MAX_REMEMBERED = 10_000


class RequestScope:
    """One handler at work on one request; an async context manager around the handler's body."""

    def __init__(self, table: RequestTable, rid: str) -> None:
        self.rid = rid
        self._table = table
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0
        self._is_aborted = False

    async def __aenter__(self) -> RequestScope:
        self._table.enter(self)
        self._task = asyncio.current_task()
        assert self._task is not None, "a scope needs a task"
        self._cancelling = self._task.cancelling()
        return self

    def abort(self) -> None:
        if self._task is not None and not self._is_aborted:
            self._is_aborted = True
            self._task.cancel()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._table.leave(self)
        if not self._is_aborted or self._task is None:
            return
        # As asyncio.timeout does: the cancellation is ours unless somebody else cancelled too.
        is_ours = self._task.uncancel() <= self._cancelling
        if is_ours and isinstance(exc, asyncio.CancelledError):
            raise AbortedError("the request was aborted", request_id=self.rid) from None


class RequestTable:
    """All running scopes by rid, and the rids aborted lately.

    An abort may overtake the request it is meant for (they travel on different connections), so
    it is remembered for `remember_s` and the late request is refused.
    """

    def __init__(self, clock: Clock, *, remember_s: float = 10.0) -> None:
        self._clock = clock
        self._remember_s = remember_s
        self._scopes: dict[str, set[RequestScope]] = {}
        self._aborted: OrderedDict[str, float] = OrderedDict()
        self._idle = asyncio.Event()
        self._idle.set()
        self.num_completed = 0

    def __len__(self) -> int:
        """Number of requests (rids) being worked on."""
        return len(self._scopes)

    def scope(self, rid: str) -> RequestScope:
        """Enter this around the handler's work for `rid`.

        Raises:
            AbortedError: on entry if the rid was aborted before; on exit if it was meanwhile.
        """
        return RequestScope(self, rid)

    def enter(self, scope: RequestScope) -> None:
        self.check_not_aborted(scope.rid)
        self._scopes.setdefault(scope.rid, set()).add(scope)
        self._idle.clear()

    def leave(self, scope: RequestScope) -> None:
        scopes = self._scopes[scope.rid]
        scopes.discard(scope)
        if not scopes:
            del self._scopes[scope.rid]
            self.num_completed += 1
        if not self._scopes:
            self._idle.set()

    async def wait_idle(self) -> None:
        """Return when no request is being worked on."""
        await self._idle.wait()

    def check_not_aborted(self, rid: str) -> None:
        """Raises AbortedError if an abort of `rid` came lately."""
        self._forget_old()
        if rid in self._aborted:
            raise AbortedError("the request was aborted before it arrived", request_id=rid)

    def abort(self, rid: str) -> int:
        """Cancel the handlers of `rid`; returns how many there were."""
        self._forget_old()
        self._aborted[rid] = self._clock.monotonic() + self._remember_s
        self._aborted.move_to_end(rid)
        scopes = list(self._scopes.get(rid, ()))
        for scope in scopes:
            scope.abort()
        return len(scopes)

    def abort_all(self) -> None:
        for rid in list(self._scopes):
            self.abort(rid)

    def _forget_old(self) -> None:
        now = self._clock.monotonic()
        while self._aborted:
            rid, until = next(iter(self._aborted.items()))
            if until > now and len(self._aborted) <= _MAX_REMEMBERED:
                return
            del self._aborted[rid]
