"""A chat answer in OpenAI's exact shape: whole, or as server-sent events."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from epd.errors import EPDError

FinishReason = Literal["stop", "length"]
DONE_EVENT = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Answer:
    """What all chunks of one answer have in common."""

    rid: str
    created_unix_s: int
    model_id: str
    fingerprint: str
    num_prompt_tokens: int

    def whole(self, text: str, finish_reason: FinishReason, num_tokens: int) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": None,
            "finish_reason": finish_reason,
        }
        head = self._head("chat.completion")
        return {**head, "choices": [choice], "usage": self.usage(num_tokens)}

    def first_event(self, *, with_usage: bool) -> bytes:
        """The chunk that names the role."""
        return self._chunk({"role": "assistant", "content": ""}, None, with_usage=with_usage)

    def text_event(self, text: str, *, with_usage: bool) -> bytes:
        return self._chunk({"content": text}, None, with_usage=with_usage)

    def finish_event(self, finish_reason: FinishReason, *, with_usage: bool) -> bytes:
        return self._chunk({}, finish_reason, with_usage=with_usage)

    def usage_event(self, num_tokens: int) -> bytes:
        """The last chunk of a stream whose client asked for `include_usage`: no choices."""
        head = self._head("chat.completion.chunk")
        return _event({**head, "choices": [], "usage": self.usage(num_tokens)})

    def usage(self, num_tokens: int) -> dict[str, int]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": self.num_prompt_tokens + num_tokens,
        }

    def _chunk(
        self, delta: dict[str, str], finish_reason: FinishReason | None, *, with_usage: bool
    ) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        chunk: dict[str, Any] = {**self._head("chat.completion.chunk"), "choices": [choice]}
        if with_usage:
            # OpenAI: with include_usage every chunk has the field, null but in the last.
            chunk["usage"] = None
        return _event(chunk)

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self.rid.removeprefix('chatcmpl-')}",
            "object": kind,
            "created": self.created_unix_s,
            "model": self.model_id,
            "system_fingerprint": f"fp_{self.fingerprint[:10]}",
        }


def error_event(error: EPDError) -> bytes:
    """How a stream that has begun tells of a failure; the stream ends after it."""
    return _event(error.to_dict())


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document, ensure_ascii=False).encode() + b"\n\n"
