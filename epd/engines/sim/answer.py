"""What a simulated worker answers: numbered words that follow from a seed.

A token's text names its place in the answer (`stone1 river2 lamp3`), so that a lost, repeated or
misplaced token is seen at once. The whole answer is known from the start; decode only paces it.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal

from epd.engines.sim.profile import AnswerProfile

FinishReason = Literal["stop", "length"]

WORDS = (
    *("acorn", "amber", "birch", "brook", "cedar", "cliff", "cloud", "coral"),
    *("delta", "ember", "fern", "field", "flint", "frost", "glade", "grove"),
    *("hazel", "heron", "ivy", "lake", "lamp", "leaf", "linen", "maple"),
    *("marsh", "meadow", "moss", "oak", "otter", "pearl", "pine", "river"),
)


@dataclass(frozen=True, slots=True)
class SimAnswer:
    """One answer: the text of each token and why it ends."""

    pieces: tuple[str, ...]
    finish_reason: FinishReason

    @property
    def num_tokens(self) -> int:
        return len(self.pieces)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def first_token_id(seed: int) -> int:
    """The id (its place in `WORDS`) of the first token of the answer that `seed` gives."""
    return Random(seed).randrange(len(WORDS))


def build_answer(
    seed: int,
    lengths: AnswerProfile,
    *,
    max_new_tokens: int,
    stop_strings: list[str],
    ignores_eos: bool = False,
) -> SimAnswer:
    """The answer to a prompt.

    Args:
        seed: of the prompt, see `prompt_seed`.
        lengths: how long answers are that nothing cuts short.
        max_new_tokens: the request's limit.
        stop_strings: the answer ends before the first of them.
        ignores_eos: go on to the limit.
    """
    random = Random(seed)
    word = random.randrange(len(WORDS))
    length = Random(~seed).randint(lengths.min_tokens, lengths.max_tokens)
    is_cut = ignores_eos or length > max_new_tokens
    num_tokens = max_new_tokens if is_cut else length
    pieces: list[str] = []
    for number in range(1, num_tokens + 1):
        pieces.append(f"{' ' if pieces else ''}{WORDS[word]}{number}")
        word = random.randrange(len(WORDS))
    return _stopped(pieces, stop_strings) or SimAnswer(
        tuple(pieces), "length" if is_cut else "stop"
    )


def _stopped(pieces: list[str], stop_strings: list[str]) -> SimAnswer | None:
    """The answer up to the earliest stop string; None if it has none.

    The token that completes the stop string is the last. Tokens before it that are part of the
    stop string have no text, as if held back.
    """
    text = "".join(pieces)
    starts = [(text.find(stop), stop) for stop in stop_strings if stop in text]
    if not starts:
        return None
    cut, stop = min(starts)
    kept: list[str] = []
    position = 0
    for piece in pieces:
        kept.append(piece[: max(0, cut - position)])
        position += len(piece)
        if position >= cut + len(stop):
            break
    return SimAnswer(tuple(kept), "stop")
