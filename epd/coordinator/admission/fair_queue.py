"""The requests of one class that wait, in the order in which tenants' fair shares let them go.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) over tenants: each has a virtual time,
moved on by the seconds of work it is given over its weight, and the one furthest behind goes first.
A tenant that comes back starts at the virtual time of the queue, so that idling earns no credit.
Its own requests go in order, but those that need a pool without room let others pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from epd.auth import Caller
from epd.coordinator.admission.model_pools import ModelPools
from epd.coordinator.admission.ticket import Lane, Ticket
from epd.types import Stage

_MIN_COST_S = 1e-6  # until speeds are known, shares are by count

_Tokens = dict[tuple[ModelPools, Stage], int]


@dataclass(slots=True)
class _Tenant:
    weight: float
    virtual_s: float = 0.0
    num_waiting: int = 0
    lanes: dict[Lane, dict[Ticket, None]] = field(default_factory=dict[Lane, dict[Ticket, None]])
    tokens: _Tokens = field(default_factory=_Tokens)

    def count(self, ticket: Ticket, sign: int) -> None:
        assert ticket.pools is not None, "a ticket that waits has a model"
        self.num_waiting += sign
        for stage in (Stage.ENCODE, Stage.PREFILL):
            key = ticket.pools, stage
            self.tokens[key] = self.tokens.get(key, 0) + sign * ticket.work.of(stage)


class FairQueue:
    """Tickets that wait. Not more tenants are remembered than there are names of keys."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._waiting: dict[str, _Tenant] = {}
        self._virtual_s = 0.0
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def num_of(self, caller: Caller) -> int:
        """Tickets of a tenant."""
        tenant = self._waiting.get(caller.name)
        return tenant.num_waiting if tenant else 0

    def push(self, ticket: Ticket) -> None:
        """The ticket waits from now on."""
        tenant = self._tenant(ticket.caller)
        if not tenant.num_waiting:
            tenant.virtual_s = max(tenant.virtual_s, self._virtual_s)
            self._waiting[ticket.caller.name] = tenant
        tenant.lanes.setdefault(ticket.lane, {})[ticket] = None
        tenant.count(ticket, 1)
        self._num += 1

    def remove(self, ticket: Ticket) -> None:
        """It does not wait any more."""
        name = ticket.caller.name
        tenant = self._waiting[name]
        lane = tenant.lanes[ticket.lane]
        del lane[ticket]
        if not lane:
            del tenant.lanes[ticket.lane]
        tenant.count(ticket, -1)
        self._num -= 1
        if not tenant.num_waiting:
            del self._waiting[name]
            tenant.tokens.clear()

    def charge(self, caller: Caller, cost_s: float) -> None:
        """A tenant has been given so much work, whether it waited for it or not."""
        tenant = self._tenant(caller)
        if not tenant.num_waiting:
            tenant.virtual_s = max(tenant.virtual_s, self._virtual_s)
        self._virtual_s = max(self._virtual_s, tenant.virtual_s)
        tenant.virtual_s += max(cost_s, _MIN_COST_S) / tenant.weight

    def first(self, is_blocked: Callable[[Lane], bool]) -> Ticket | None:
        """Whose turn it is, of the lanes that are not blocked; it stays in the queue."""
        best: Ticket | None = None
        best_rank = (0.0, 0)
        for tenant in self._waiting.values():
            for lane, tickets in tenant.lanes.items():
                if is_blocked(lane):
                    continue
                ticket = next(iter(tickets))
                rank = (tenant.virtual_s, ticket.number)
                if best is None or rank < best_rank:
                    best, best_rank = ticket, rank
        return best

    def newest_of_heaviest(self) -> tuple[Ticket, float] | None:
        """The last ticket of the tenant with most of them for its weight, and that ratio."""
        if not self._waiting:
            return None
        tenant = max(self._waiting.values(), key=lambda t: t.num_waiting / t.weight)
        newest = max((next(reversed(lane)) for lane in tenant.lanes.values()), key=_number)
        return newest, tenant.num_waiting / tenant.weight

    def tokens(self, pools: ModelPools, stage: Stage) -> int:
        """Of all that wait, at one stage."""
        return sum(tenant.tokens.get((pools, stage), 0) for tenant in self._waiting.values())

    def tokens_of(self, caller: Caller, pools: ModelPools, stage: Stage) -> int:
        """Of a tenant's that wait, at one stage."""
        tenant = self._waiting.get(caller.name)
        return tenant.tokens.get((pools, stage), 0) if tenant else 0

    def tokens_until(self, ticket: Ticket, stage: Stage) -> float:
        """What is done until a tenant's last ticket is through.

        That is all of its own, and of each other's as much as is their share meanwhile.
        """
        assert ticket.pools is not None, "a ticket that waits has a model"
        own = self.tokens_of(ticket.caller, ticket.pools, stage)
        others = (
            min(
                tenant.tokens.get((ticket.pools, stage), 0),
                own * tenant.weight / ticket.caller.weight,
            )
            for name, tenant in self._waiting.items()
            if name != ticket.caller.name
        )
        return own + sum(others)

    def models(self) -> set[ModelPools]:
        """Of all that wait."""
        return {pools for tenant in self._waiting.values() for pools, _ in tenant.lanes}

    def _tenant(self, caller: Caller) -> _Tenant:
        tenant = self._tenants.get(caller.name)
        if tenant is None:
            tenant = self._tenants[caller.name] = _Tenant(caller.weight)
        return tenant


def _number(ticket: Ticket) -> int:
    return ticket.number
