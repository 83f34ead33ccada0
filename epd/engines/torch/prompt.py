"""Chat messages to token ids, in two phases: image sizes are known only once images are encoded.

`tokenize` runs when the request arrives, `expand` when the encode workers have said the grids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jinja2
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from encoders import ImageGrid
from epd.engines.torch.checkpoint import Checkpoint
from epd.errors import BadRequestError, ConfigError

Message = Mapping[str, Any]
"""OpenAI's shape: `role`, and `content`: a string, None, or text and image_url parts."""

_PRIVATE_USE = range(0xE000, 0xF900)  # Unicode's private use area: characters without a meaning

# Characters that a tokenizer may compose into one (UAX #15, NFC: four become U+1F82).
_MAX_COMPOSED = 4


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """A prompt with one placeholder token per image."""

    token_ids: list[int]
    image_indices: list[int]
    """Where in `token_ids` the placeholders are, in order of the images."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as prefill computes it: one placeholder token per image token.

    Tokens of an answer that is continued may follow it.
    """

    token_ids: list[int]
    positions: list[list[int]]
    """M-RoPE positions, `[3][num_tokens]`"""
    next_position: int
    """Position of the token after the last."""
    num_generated: int = 0
    """How many tokens at the end are of an answer: none of these stands for an image."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.token_ids) - self.num_generated

    def followed_by(self, token_ids: Sequence[int]) -> Prompt:
        """With generated tokens at the end, in the positions that decode gave them."""
        end = self.next_position + len(token_ids)
        return Prompt(
            [*self.token_ids, *token_ids],
            [[*axis, *range(self.next_position, end)] for axis in self.positions],
            end,
            self.num_generated + len(token_ids),
        )


class PromptTokenizer:
    """The checkpoint's tokenizer and chat template."""

    def __init__(self, path: Path) -> None:
        checkpoint = Checkpoint(path)
        self._family = checkpoint.family
        self._budget = checkpoint.image_budget
        self._image_token_id = checkpoint.image_token_id
        self._hf = load_tokenizer(path)
        self._template = _chat_template(path, self._hf)
        self.tokenizer = cast("Tokenizer", self._hf.backend_tokenizer)
        # What lies between the template's special tokens is plain text, whatever it looks like.
        self.tokenizer.encode_special_tokens = True
        self._special_ids: dict[str, int] = {
            token.content: token_id
            for token_id, token in self.tokenizer.get_added_tokens_decoder().items()
            if token.special
        }
        self._max_token_chars = max(map(len, self.tokenizer.get_vocab()))
        longest_first = sorted(self._special_ids, key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def tokenize(self, messages: Sequence[Message]) -> PromptTokens:
        """Render the conversation and tokenize it, ready for the assistant's answer.

        Raises:
            BadRequestError: the model's chat template refuses the conversation.
        """
        token_ids = self._encode(messages)
        indices = [i for i, token_id in enumerate(token_ids) if token_id == self._image_token_id]
        num_images = sum(_count_images(message) for message in messages)
        if len(indices) != num_images:
            raise BadRequestError(
                f"the model's chat template has room for {len(indices)} of {num_images} images: "
                "place images in user messages",
                param="messages",
            )
        return PromptTokens(token_ids, indices)

    def least_tokens(self, messages: Sequence[Message]) -> int:
        """Tokens that the texts become at least, told from their length alone."""
        num_chars = sum(
            len(text) if text.isascii() else len(text) // _MAX_COMPOSED
            for message in messages
            for text in _texts(message)
        )
        return num_chars // self._max_token_chars

    def expand(self, tokens: PromptTokens, grids: Sequence[ImageGrid]) -> Prompt:
        """Repeat each placeholder as often as its image has tokens; `grids` in image order."""
        if len(grids) != len(tokens.image_indices):
            raise ValueError(f"{len(tokens.image_indices)} images, but {len(grids)} grids")
        sizes = dict(zip(tokens.image_indices, grids, strict=True))
        token_ids: list[int] = []
        for index, token_id in enumerate(tokens.token_ids):
            grid = sizes.get(index)
            repeats = 1 if grid is None else self._family.grid_tokens(grid, self._budget)
            token_ids += [token_id] * repeats
        positions = self._family.positions(token_ids, self._image_token_id, grids, self._budget)
        return Prompt(token_ids, positions.axes, positions.next_position)

    def _encode(self, messages: Sequence[Message]) -> list[int]:
        """Tokenize so that only the template itself can make special tokens.

        A client may write `<|im_end|>` in a text, even split over two parts that the template
        joins, and must not forge a turn or an image by it. So the first character of every special
        token is disguised in the client's texts while the template is rendered. Special tokens in
        the result are then the template's own; the texts between them are undisguised and encoded
        with special tokens switched off. For ordinary texts the result is that of transformers,
        which also splits at special tokens first.
        """
        texts = "".join(text for message in messages for text in _texts(message))
        disguise = _disguise({token[0] for token in self._special_ids}, texts)
        undisguise = {ord(new): old for old, new in disguise.items()}
        rendered = self._render([_template_message(m, str.maketrans(disguise)) for m in messages])
        token_ids: list[int] = []
        # Splitting at a captured pattern: texts at even places, special tokens at odd ones.
        for place, piece in enumerate(self._special.split(rendered)):
            if place % 2:
                token_ids.append(self._special_ids[piece])
            elif piece:
                text = piece.translate(undisguise)
                # Not `encode`: it keeps all other threads waiting, heartbeats too, for seconds
                # per megabyte (tokenizers 0.23).
                encodings = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)
                token_ids += encodings[0].ids
        return token_ids

    def _render(self, messages: list[dict[str, Any]]) -> str:
        try:
            return str(
                self._hf.apply_chat_template(
                    messages,
                    chat_template=self._template,
                    tokenize=False,
                    add_generation_prompt=True,
                )
            )
        except jinja2.TemplateError as exc:  # raise_exception() in the template
            raise BadRequestError(
                f"the model's chat template refuses this conversation: {exc}", param="messages"
            ) from exc


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer, from local files only.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path} has no tokenizer that can be read: {exc}") from exc


def _chat_template(path: Path, tokenizer: PreTrainedTokenizerBase) -> str:
    """chat_template.jinja, or chat_template.json (older checkpoints), or the tokenizer's own."""
    jinja, older = path / "chat_template.jinja", path / "chat_template.json"
    if jinja.exists():
        return jinja.read_text(encoding="utf-8")
    if older.exists():
        return str(json.loads(older.read_text(encoding="utf-8"))["chat_template"])
    template: Any = tokenizer.chat_template
    if not isinstance(template, str):
        raise ConfigError(f"{path} has no chat template")
    return template


def _disguise(characters: set[str], texts: str) -> dict[str, str]:
    """A stand-in for each of `characters`, none of which occurs in `texts`."""
    taken = set(texts)
    spare = (chr(code) for code in _PRIVATE_USE if chr(code) not in taken)
    stand_ins = dict(zip(sorted(characters), spare, strict=False))
    if len(stand_ins) < len(characters):
        raise BadRequestError(
            "the texts use every character of Unicode's private use area", param="messages"
        )
    return stand_ins


def _template_message(message: Message, disguise: dict[int, str]) -> dict[str, Any]:
    """The message in the shape that chat templates of vision models expect."""
    # OpenAI's newer name for the system role, which the templates do not know.
    role = "system" if message["role"] == "developer" else message["role"]
    content = message.get("content") or ""
    if isinstance(content, str):
        return {"role": role, "content": content.translate(disguise)}
    parts = [
        {"type": "text", "text": part["text"].translate(disguise)}
        if part["type"] == "text"
        else {"type": "image"}
        for part in content
    ]
    return {"role": role, "content": parts}


def _texts(message: Message) -> list[str]:
    content = message.get("content") or ""
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content if part["type"] == "text"]


def _count_images(message: Message) -> int:
    content = message.get("content") or ""
    return 0 if isinstance(content, str) else sum(part["type"] != "text" for part in content)
