"""A chat answer in OpenAI's exact shape: whole, or as server-sent events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from epd.engines.shell import Shell
from epd.errors import BadRequestError, EPDError
from epd.wire import ChatRequest, ContinueFrom, RoomDescriptor

FinishReason = Literal["stop", "length"]
_DONE_EVENT = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Answer:
    """What the answer, or each of its chunks, says beside the text."""

    rid: str
    created_unix_s: int
    model_id: str
    fingerprint: str
    num_prompt_tokens: int

    @classmethod
    def to(cls, chat: ChatRequest, rid: str, descriptor: RoomDescriptor, shell: Shell) -> Answer:
        """The answer to a request whose room is known; one that is continued keeps its name."""
        begun = chat.continue_from or ContinueFrom(token_ids=[])
        created = shell.clock.time() if begun.created is None else begun.created
        return cls(
            rid=begun.id or rid,
            created_unix_s=int(created),
            model_id=shell.identity.model.model_id,
            fingerprint=descriptor.layout.model_fingerprint,
            num_prompt_tokens=descriptor.num_prompt_tokens,
        )

    def whole(self, text: str, finish_reason: FinishReason, num_tokens: int) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": None,
            "finish_reason": finish_reason,
        }
        head = self.head("chat.completion")
        return {**head, "choices": [choice], "usage": self.usage(num_tokens)}

    def usage(self, num_tokens: int) -> dict[str, int]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": self.num_prompt_tokens + num_tokens,
        }

    def head(self, kind: str) -> dict[str, Any]:
        """The fields that stand first; `kind` is the object's type."""
        return {
            "id": f"chatcmpl-{self.rid.removeprefix('chatcmpl-')}",
            "object": kind,
            "created": self.created_unix_s,
            "model": self.model_id,
            "system_fingerprint": f"fp_{self.fingerprint[:10]}",
        }


class AnswerEvents:
    """The events of one streamed answer, in order; of one that is continued, those not yet sent.

    With `return_token_ids` each chunk tells the tokens that were generated since the one before,
    those included whose text is held back. So at the end of any chunk the tokens told so far are
    all there is to know: from them follow the text that was sent and the text that was not.
    """

    def __init__(self, answer: Answer, chat: ChatRequest, token_ids: Sequence[int]) -> None:
        """Prepare the events.

        Args:
            answer: what the chunks have in common.
            chat: the request.
            token_ids: of the whole answer; may still grow at its end.
        """
        self._answer = answer
        self._token_ids = token_ids if chat.return_token_ids else None
        self._num_told = len(chat.generated_token_ids)
        self._is_continued = chat.continue_from is not None
        self._with_usage = chat.with_usage

    def begin(self) -> bytes:
        """The chunk that names the role."""
        if self._is_continued:
            return b""
        return self._chunk({"role": "assistant", "content": ""}, self._num_told)

    def text(self, text: str, num_tokens: int) -> bytes:
        """What `text` adds, which may be nothing, once `num_tokens` are generated."""
        return self._chunk({"content": text}, num_tokens) if text else b""

    def end(self, finish_reason: FinishReason, num_tokens: int) -> bytes:
        """All that follows the last text."""
        events = self._chunk({}, num_tokens, finish_reason)
        if self._with_usage:
            head = self._answer.head("chat.completion.chunk")
            events += _event({**head, "choices": [], "usage": self._answer.usage(num_tokens)})
        return events + _DONE_EVENT

    def _chunk(
        self, delta: dict[str, str], num_tokens: int, finish_reason: FinishReason | None = None
    ) -> bytes:
        choice: dict[str, Any] = {
            "index": 0,
            "delta": delta,
            "logprobs": None,
            "finish_reason": finish_reason,
        }
        if self._token_ids is not None:
            # Last in the choice, so that nothing a model wrote comes after it.
            choice["token_ids"] = list(self._token_ids[self._num_told : num_tokens])
            self._num_told = num_tokens
        head = self._answer.head("chat.completion.chunk")
        chunk: dict[str, Any] = {**head, "choices": [choice]}
        if self._with_usage:
            # OpenAI: with include_usage every chunk has the field, null but in the last.
            chunk["usage"] = None
        return _event(chunk)


def ended_before(num_tokens: int) -> BadRequestError:
    """The error of a request to continue an answer that ended with token `num_tokens`."""
    return BadRequestError(
        f"continue_from.token_ids goes on after token {num_tokens}, with which the answer ended",
        param="continue_from.token_ids",
    )


def error_event(error: EPDError) -> bytes:
    """How a stream that has begun tells of a failure; the stream ends after it."""
    return _event(error.to_dict())


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document, ensure_ascii=False).encode() + b"\n\n"
