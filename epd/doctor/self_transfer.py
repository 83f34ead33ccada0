"""`python -m epd.doctor.self_transfer`: two Mooncake engines, one write, loopback.

A program of its own because a broken Mooncake can take its process down. Exits 0 with one line on
standard output, or 1 with one line on standard error.
"""

from __future__ import annotations

import asyncio
import sys
import time

from epd.errors import EPDError, TransferError
from epd.transfer import Block, HostMemory, MooncakeEngine

_NBYTES = 4 * 2**20
_TIMEOUT_S = 15.0


async def transfer() -> float:
    """Write a pattern from one engine's memory to another's; returns the seconds it took.

    Raises:
        EPDError: Mooncake is missing, or the bytes did not arrive.
    """
    sender, receiver = MooncakeEngine("127.0.0.1"), MooncakeEngine("127.0.0.1")
    source, destination = HostMemory(_NBYTES), HostMemory(_NBYTES)
    sender.register(source.address, _NBYTES)
    receiver.register(destination.address, _NBYTES)
    pattern = bytes(range(256)) * (_NBYTES // 256)
    source.view()[:] = pattern
    block = Block(source.address, destination.address, _NBYTES)
    started_s = time.perf_counter()
    await sender.write(receiver.session_id, [block], timeout_s=_TIMEOUT_S)
    took_s = time.perf_counter() - started_s
    if destination.view().tobytes() != pattern:
        raise TransferError("the bytes that arrived are not those that were sent")
    return took_s


def main() -> int:
    try:
        took_s = asyncio.run(transfer())
    except EPDError as exc:
        print(exc.message, file=sys.stderr)
        return 1
    mib = _NBYTES / 2**20
    print(f"{mib:.0f} MiB from engine to engine over loopback TCP in {took_s * 1e3:.1f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
