from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest

from epd.transfer import HostMemory, LoopbackNetwork, MooncakeEngine
from tests.transfer.peers import LoopbackPeer, MooncakePeer, Peer, Sender

SENDER_BYTES = 64 << 20


def _random_memory() -> HostMemory:
    memory = HostMemory(SENDER_BYTES)
    with memory.view() as view:
        view[:] = os.urandom(SENDER_BYTES)
    return memory


@pytest.fixture(scope="session")
def mooncake_engine() -> Iterator[tuple[MooncakeEngine, HostMemory]]:
    """One engine for the whole run: each costs eight threads and a second at exit."""
    pytest.importorskip("mooncake.engine")
    memory = _random_memory()
    engine = MooncakeEngine("127.0.0.1")
    engine.register(memory.address, memory.nbytes)
    yield engine, memory
    engine.close()


@pytest.fixture
def mooncake(mooncake_engine: tuple[MooncakeEngine, HostMemory]) -> Iterator[Sender]:
    peers: list[MooncakePeer] = []

    def new_peer() -> Peer:
        peers.append(MooncakePeer())
        return peers[-1]

    yield Sender(*mooncake_engine, new_peer)
    for peer in peers:
        peer.close()


@pytest.fixture
async def loopback() -> Sender:
    network = LoopbackNetwork()
    memory = _random_memory()
    engine = network.engine("sender")
    engine.register(memory.address, memory.nbytes)
    names = (f"peer-{number}" for number in itertools.count())
    return Sender(engine, memory, lambda: LoopbackPeer(network, next(names)))


@pytest.fixture(params=["loopback", "mooncake"])
def sender(request: pytest.FixtureRequest) -> Sender:
    """Runs a test against every implementation of `TransferEngine`."""
    return request.getfixturevalue(request.param)
