"""The two ends of a transfer under test: a local sender, and receivers of either kind."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from epd.transfer import HostMemory, LoopbackNetwork, TransferEngine

PEER_BYTES = 64 << 20
_PEER_SCRIPT = Path(__file__).with_name("mooncake_peer.py")


class Peer(Protocol):
    session_id: str
    address: int
    nbytes: int

    def digest(self, offset: int, nbytes: int) -> str: ...

    def kill(self) -> None: ...


@dataclass
class Sender:
    """An engine with registered memory, and a way to start peers that it can write to."""

    engine: TransferEngine
    memory: HostMemory
    new_peer: Callable[[], Peer]


class LoopbackPeer:
    """An engine of the same process."""

    def __init__(self, network: LoopbackNetwork, session_id: str) -> None:
        self._memory = HostMemory(PEER_BYTES)
        self._engine = network.engine(session_id)
        self._engine.register(self._memory.address, PEER_BYTES)
        self.session_id = session_id
        self.address = self._memory.address
        self.nbytes = PEER_BYTES

    def digest(self, offset: int, nbytes: int) -> str:
        return hashlib.sha256(self._memory.view()[offset : offset + nbytes]).hexdigest()

    def kill(self) -> None:
        self._engine.close()


class MooncakePeer:
    """An engine of another process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(_PEER_SCRIPT), str(PEER_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.session_id, address = self._answer().split()
        self.address = int(address)
        self.nbytes = PEER_BYTES

    def digest(self, offset: int, nbytes: int) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(f"digest {offset} {nbytes}\n")
        self._process.stdin.flush()
        return self._answer()

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL: no goodbye to the sender."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            self.kill()
            raise RuntimeError("the peer process died")
        return line
