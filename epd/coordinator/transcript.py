"""What a client has of a streamed answer, so that other workers can go on where a stream broke off.

Workers that can continue an answer tell the token ids of each chunk (docs/contract.md, "Continuing
an answer"). They are noted and cut out on the way. JSON is not parsed for it: inside a chunk's text
every quote is escaped, so what is looked for can only be a key.
"""

from __future__ import annotations

import json
from typing import Any

_IDS = b', "token_ids": ['
_FINISH = b'"finish_reason": "'
_EVENT = b"data: "
_EVENT_END = b"\n\n"
_DONE = b"data: [DONE]\n\n"


class Transcript:
    """The chunks of one answer that were relayed.

    Args:
        with_usage: whether the client asked for a last chunk with token counts.
    """

    def __init__(self, *, with_usage: bool) -> None:
        self.token_ids: list[int] = []
        """Of all tokens of the relayed chunks, those whose text is held back too."""
        self.is_finished = False
        """Whether the client has the finish reason: there is nothing to compute any more."""
        self.prefill_answer = b"{}"
        """What prefill said at its end; it counts the prompt's tokens."""
        self._with_usage = with_usage
        self._first = b""

    def note(self, events: bytes) -> bytes:
        """Note whole events that go to the client; returns them as the client gets them."""
        if not self._first:
            self._first = events.partition(_EVENT_END)[0].removeprefix(_EVENT)
        if not self.is_finished:
            self.is_finished = _FINISH in events
        pieces: list[bytes] = []
        at = 0
        while (start := events.find(_IDS, at)) >= 0:
            end = events.index(b"]", start)
            ids = events[start + len(_IDS) : end]
            self.token_ids += map(int, ids.split(b",")) if ids else ()
            pieces.append(events[at:start])
            at = end + 1
        return b"".join((*pieces, events[at:]))

    @property
    def fields(self) -> dict[str, Any]:
        """What to add to a request for the rest of the answer, or for all of it."""
        if not self._first:
            return {"return_token_ids": True}
        first = json.loads(self._first)
        begun = {"token_ids": self.token_ids, "id": first["id"], "created": first["created"]}
        return {"return_token_ids": True, "continue_from": begun}

    @property
    def end(self) -> bytes | None:
        """The events after the finish reason: token counts if they were asked for, and DONE.

        None if the counts cannot be told, as prefill did not say how long the prompt is.
        """
        if not self._with_usage:
            return _DONE
        prefill = json.loads(self.prefill_answer)
        if "usage" not in prefill:
            return None
        num_prompt, num_answer = prefill["usage"]["prompt_tokens"], len(self.token_ids)
        usage = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_answer,
            "total_tokens": num_prompt + num_answer,
        }
        last = {**json.loads(self._first), "choices": [], "usage": usage}
        return _EVENT + json.dumps(last).encode() + _EVENT_END + _DONE
