"""How many bytes of request bodies are held at once: those of one request, and those of all."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from epd.errors import OverloadedError, TooLargeError


class BodyBudget:
    """The bytes of all requests' bodies in memory. For use on one event loop only.

    Args:
        max_body_bytes: of one request.
        max_bytes: of all together; at least `max_body_bytes`.
    """

    def __init__(self, *, max_body_bytes: int, max_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        self.max_bytes = max_bytes
        self.num_bytes = 0

    @contextlib.contextmanager
    def share(self) -> Generator[BodyShare]:
        """The share of one request, given back at the end of the block."""
        share = BodyShare(self)
        try:
            yield share
        finally:
            share.keep(0)


class BodyShare:
    """What the body of one request takes of the budget.

    Bytes count once they are here. What a client only announces would cost it nothing, and keep
    out others.
    """

    def __init__(self, budget: BodyBudget) -> None:
        self.num_bytes = 0
        self._budget = budget

    def check(self, num_bytes: int) -> None:
        """Refuse a body of `num_bytes` for which there is no room.

        Raises:
            TooLargeError: no request may have so large a body.
            OverloadedError: the others leave too little room now.
        """
        budget = self._budget
        if num_bytes > budget.max_body_bytes:
            raise TooLargeError(
                f"the request body has more than the {budget.max_body_bytes} bytes allowed: send "
                "fewer or smaller images, or their URLs"
            )
        if budget.num_bytes - self.num_bytes + num_bytes > budget.max_bytes:
            raise OverloadedError(
                f"the requests in flight leave no room for this one's body, of {budget.max_bytes} "
                "bytes for all: retry in a moment",
                retry_after_s=1.0,
            )

    def take(self, num_bytes: int) -> None:
        """So many more bytes have come; raises as `check`."""
        self.check(self.num_bytes + num_bytes)
        self.keep(self.num_bytes + num_bytes)

    def keep(self, num_bytes: int) -> None:
        """From now on the request holds `num_bytes`, whether there is room for them or not."""
        self._budget.num_bytes += num_bytes - self.num_bytes
        self.num_bytes = num_bytes
