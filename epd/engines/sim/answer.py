"""What a simulated worker answers: numbered words that follow from a seed.

A token's text names its place in the answer (`stone1 river2 lamp3`), so that a lost, repeated or
misplaced token is seen at once. The whole answer is known from the start; decode only paces it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Literal

from epd.engines.sim.profile import AnswerProfile
from epd.errors import BadRequestError

FinishReason = Literal["stop", "length"]

WORDS = (
    *("acorn", "amber", "birch", "brook", "cedar", "cliff", "cloud", "coral"),
    *("delta", "ember", "fern", "field", "flint", "frost", "glade", "grove"),
    *("hazel", "heron", "ivy", "lake", "lamp", "leaf", "linen", "maple"),
    *("marsh", "meadow", "moss", "oak", "otter", "pearl", "pine", "river"),
)


@dataclass(frozen=True, slots=True)
class SimAnswer:
    """One answer: its tokens, the text of each, and why it ends."""

    token_ids: tuple[int, ...]
    """A token's id is the place of its word in `WORDS`."""
    pieces: tuple[str, ...]
    finish_reason: FinishReason

    @property
    def num_tokens(self) -> int:
        return len(self.pieces)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def token_id_after(seed: int, token_ids: Sequence[int]) -> int:
    """The token that follows the first `token_ids` of the answer that `seed` gives.

    Raises:
        BadRequestError: the answer begins with others.
    """
    expected = _token_ids(seed)
    for index, token_id in enumerate(token_ids):
        if token_id != next(expected):
            path = f"continue_from.token_ids[{index}]"
            raise BadRequestError(
                f"{path}: the answer to this request has another token than {token_id} here",
                param=path,
            )
    return next(expected)


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
    length = Random(~seed).randint(lengths.min_tokens, lengths.max_tokens)
    is_cut = ignores_eos or length > max_new_tokens
    num_tokens = max_new_tokens if is_cut else length
    token_ids = tuple(islice(_token_ids(seed), num_tokens))
    pieces = [
        f"{' ' if number > 1 else ''}{WORDS[token_id]}{number}"
        for number, token_id in enumerate(token_ids, 1)
    ]
    kept = _until_stop(pieces, stop_strings)
    if kept is not None:
        return SimAnswer(token_ids[: len(kept)], tuple(kept), "stop")
    return SimAnswer(token_ids, tuple(pieces), "length" if is_cut else "stop")


def _token_ids(seed: int) -> Iterator[int]:
    """Those of the answer, and on and on."""
    random = Random(seed)
    while True:
        yield random.randrange(len(WORDS))


def _until_stop(pieces: list[str], stop_strings: list[str]) -> list[str] | None:
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
    return kept
