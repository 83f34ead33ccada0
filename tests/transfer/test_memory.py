from __future__ import annotations

import ctypes
import mmap

import pytest

from epd.transfer import HostMemory


def test_memory_is_zeroed_page_aligned_and_written_through_its_view() -> None:
    memory = HostMemory(10_000)
    assert memory.address % mmap.PAGESIZE == 0
    with memory.view() as view:
        assert bytes(view) == bytes(10_000)
        view[9_990:] = b"0123456789"
    assert ctypes.string_at(memory.address + 9_990, 10) == b"0123456789"
    memory.close()


def test_memory_in_use_is_not_unmapped() -> None:
    memory = HostMemory(10)
    view = memory.view()
    with pytest.raises(BufferError):
        memory.close()
    view.release()
    memory.close()


def test_empty_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        HostMemory(0)
