"""A worker's arena memory: one flat byte tensor, registered once with the transfer engine."""

from __future__ import annotations

import torch
from torch import Tensor

from epd.transfer import HostMemory, TransferEngine


def registered_buffer(nbytes: int, device: str, transfer: TransferEngine) -> Tensor:
    """`[nbytes], uint8` on `device`, open to peers' writes. Host pages are taken when touched."""
    if device == "cpu":
        # The tensor keeps the mapping alive.
        buffer = torch.frombuffer(HostMemory(nbytes).view(), dtype=torch.uint8)
    else:
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
    transfer.register(buffer.data_ptr(), nbytes)
    return buffer


def rows(buffer: Tensor, offset: int, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """`[num_rows, width]` of `dtype`: a view of `buffer` from byte `offset` on."""
    nbytes = num_rows * width * dtype.itemsize
    return buffer[offset : offset + nbytes].view(dtype).view(num_rows, width)


def finish(device: str) -> None:
    """Wait until what was computed is in memory, where the transfer engine may read it."""
    if device != "cpu":
        torch.cuda.synchronize(device)
