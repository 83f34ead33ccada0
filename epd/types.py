"""The nouns shared by every part of EPD: stages, ids, worker states and classes of requests."""

from __future__ import annotations

from enum import StrEnum
from typing import NewType

WorkerId = NewType("WorkerId", str)
RequestId = NewType("RequestId", str)
Room = NewType("Room", int)
"""Names one prefill-to-decode hand-off: 63 random bits, never reused (SGLang's bootstrap_room)."""


class Stage(StrEnum):
    """One of the three stages of a request, each served by its own pool."""

    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"


class WorkerState(StrEnum):
    """What a worker says of itself (the first four) or the registry finds out (the last two).

    starting → ready → draining → gone is the worker's own life. A refused connection makes it
    suspect until its next heartbeat; a lapsed lease makes it lost until it comes back.
    Only ready workers are given new work.
    """

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    GONE = "gone"
    SUSPECT = "suspect"
    LOST = "lost"


class RequestClass(StrEnum):
    """How urgent a request is, the more urgent first."""

    INTERACTIVE = "interactive"
    BATCH = "batch"
