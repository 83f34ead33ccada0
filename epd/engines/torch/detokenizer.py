"""Tokens to text, piece by piece: whole characters only, and nothing from a stop string on.

One `Detokenizer` per request; it also decides when the answer is over.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from epd.engines.contract.answers import FinishReason, ended_before

_REPLACEMENT = "�"  # what a decoder puts for bytes that are not (yet) a character


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What a token added to the answer: text that may be sent now, and whether it was the last."""

    text: str
    finish_reason: FinishReason | None = None


class Detokenizer:
    """Turns one request's generated tokens into text.

    The concatenated texts equal decoding all tokens at once, cut before the first stop string.
    Relies on a byte-level decoder (all Qwen models): tokens are bytes, and join without spaces.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        eos_token_ids: Collection[int],
        max_new_tokens: int,
        stop_strings: Sequence[str] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._max_new_tokens = max_new_tokens
        self._stop_strings = stop_strings
        self._pending_ids: list[int] = []  # tokens whose last character is not complete
        self._held = ""  # text that may be the start of a stop string
        self.token_ids: list[int] = []
        """All tokens, those included whose text is held back."""
        self.finish_reason: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def replay(self, token_ids: Sequence[int]) -> None:
        """Take the first tokens of an answer that another worker began, and sent the text of.

        A delta depends on nothing but the tokens up to its own, so what is left to send is left
        here too: a character whose bytes are not complete, an end that a stop string may begin
        with. Takes about 6 us a token: call it in a thread.

        Raises:
            BadRequestError: the answer was over before the last of them.
        """
        for token_id in token_ids:
            if self.finish_reason is not None:
                raise ended_before(self.num_tokens)
            self.push(token_id)

    def push(self, token_id: int) -> TextDelta:
        """Take the next token, up to and including the one that ends the answer."""
        assert self.finish_reason is None, "a token after the end of the answer"
        self.token_ids.append(token_id)
        self._pending_ids.append(token_id)
        if token_id in self._eos_token_ids:
            self.finish_reason = "stop"
        elif self.num_tokens >= self._max_new_tokens:
            self.finish_reason = "length"

        self._held += self._complete_text()
        cut = self._first_stop()
        if cut is not None:
            self.finish_reason = "stop"
        elif self.finish_reason is None:
            cut = len(self._held) - self._length_to_hold()
        text, self._held = self._held[:cut], self._held[cut:]
        return TextDelta(text, self.finish_reason)

    def _complete_text(self) -> str:
        """The text of the pending tokens, or "" while its last character may lack bytes."""
        text: str = self._tokenizer.decode(self._pending_ids, skip_special_tokens=True)
        if text.endswith(_REPLACEMENT) and self.finish_reason is None:
            return ""
        self._pending_ids.clear()
        return text

    def _first_stop(self) -> int | None:
        """Where the earliest stop string begins in the held text."""
        found = [self._held.find(stop) for stop in self._stop_strings]
        return min((index for index in found if index >= 0), default=None)

    def _length_to_hold(self) -> int:
        """How long an end of the held text is that a stop string may begin with."""
        return max(
            (
                length
                for stop in self._stop_strings
                for length in range(1, min(len(stop), len(self._held) + 1))
                if self._held.endswith(stop[:length])
            ),
            default=0,
        )
