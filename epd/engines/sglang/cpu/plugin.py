"""SGLang's assumptions of GPU memory, corrected through its plugin entry point where no CUDA is.

SGLang calls `activate` in each of its processes (`load_plugins`, sglang/srt/plugins, 0.5.23).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from epd.engines.sglang.environment import WORKER_VARIABLE


def activate() -> None:
    """Register the hooks; the entry point `sglang.srt.plugins` of epd-serve names this."""
    if torch.cuda.is_available() or WORKER_VARIABLE not in os.environ:
        return
    _send_kv_without_pinned_memory()
    _receive_embeddings_in_host_memory()


def _send_kv_without_pinned_memory() -> None:
    # disaggregation/prefill.py:1746 (0.5.23) copies page indices through pinned memory and a CUDA
    # event for senders that say they can take them so; the other branch needs neither.
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender  # pyright: ignore[reportMissingImports]

    MooncakeKVSender.supports_host_tensor_indices = False


def _receive_embeddings_in_host_memory() -> None:
    # disaggregation/encoder/receiver.py (0.5.23): the pool that Mooncake writes embeddings into is
    # allocated on "cuda:N". Host memory is as good a target for Mooncake over TCP.
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # pyright: ignore[reportMissingImports]

    HookRegistry.register(
        "sglang.srt.disaggregation.encoder.receiver.EmbeddingPool.__init__",
        _allocate_on_host,
        HookType.AROUND,
    )


def _allocate_on_host(original: Callable[..., None], *args: object, **kwargs: object) -> None:
    with _HostMemory():
        original(*args, **kwargs)


class _HostMemory(TorchFunctionMode):
    """Within this context a tensor asked for on a GPU is made in host memory."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)
