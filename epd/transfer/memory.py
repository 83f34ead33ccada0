"""Page-aligned host memory for arenas, without torch.

Owns one anonymous mapping. Called by workers at start; the arena divides it and the transfer
engine registers it.
"""

from __future__ import annotations

import ctypes
import mmap


class HostMemory:
    """`nbytes` of zeroed, page-aligned, private memory; pages are taken when first touched."""

    def __init__(self, nbytes: int) -> None:
        if nbytes <= 0:
            raise ValueError(f"host memory needs at least one byte, not {nbytes}")
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # The ctypes view is dropped at once: while it lives the mapping cannot be closed.
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.nbytes = nbytes

    def view(self) -> memoryview:
        """The whole memory as writable bytes; views must be released before `close`."""
        return memoryview(self._map)

    def close(self) -> None:
        """Unmap. Only after the transfer engine is closed and every source has settled.

        Raises:
            BufferError: a view, or an array made from one, is still alive.
        """
        self._map.close()
