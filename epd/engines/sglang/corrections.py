"""Faults of a supported SGLang that take a server down, corrected through its plugin entry point.

SGLang's files stay as they are; a correction is a hook in the servers that EPD starts, for the
versions it was seen in, and goes when a release mends the fault.

- 0.5.23: a language-only prefill server tokenizes a prompt with images only when the embeddings
  are there. If an encoder fails, or the request is aborted, before that, the scheduler takes the
  length of the missing tokens and dies, and with it every other request
  (disaggregation/encoder/receiver.py `create_req`, managers/scheduler_components/
  output_streamer.py:493). Seen December 2026 with Qwen2.5-VL. A request without tokens gets none
  instead of nothing, so that it alone is answered with the error.
"""

from __future__ import annotations

import os
from array import array
from typing import Any

from epd.engines.sglang.environment import WORKER_VARIABLE

_VERSIONS = frozenset({"0.5.23"})


def activate() -> None:
    """Register the hooks; the entry point `sglang.srt.plugins` of epd-serve names this."""
    from sglang.version import __version__  # pyright: ignore[reportMissingImports]

    if __version__ not in _VERSIONS or WORKER_VARIABLE not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # pyright: ignore[reportMissingImports]

    HookRegistry.register(
        "sglang.srt.disaggregation.encoder.receiver.MMReceiverBase.create_req",
        give_tokens,
        HookType.BEFORE,
    )


def give_tokens(receiver: Any, recv_req: Any) -> None:
    """Called before a request that failed while it waited for embeddings is made to be aborted."""
    del receiver
    if recv_req.input_ids is None:
        recv_req.input_ids = array("q")
