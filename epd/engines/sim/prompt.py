"""A chat request as pseudo-tokens: how many there are, and the chain of its KV blocks.

There is no tokenizer: text is cut into pieces of equal length, and an image counts the tokens that
its grid has. Requests with the same beginning have the same first blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from epd.wire import ChatRequest, ImagePart, bare_hash

_IMAGE_MARKS = 2  # start and end of an image, as in Qwen's prompts
_HASH_BYTES = 16
_IMAGE = "\0image "
_GENERATED = "\0generated "


@dataclass(frozen=True, slots=True)
class SimPrompt:
    """A prompt whose images are encoded."""

    num_tokens: int
    num_generated: int
    """Tokens of an answer that is continued; they follow the prompt."""
    block_hashes: tuple[bytes, ...]
    """Of each full block; a hash covers all that comes before."""

    @property
    def num_kv_tokens(self) -> int:
        return self.num_tokens + self.num_generated


def build_prompt(
    request: ChatRequest,
    image_tokens: Sequence[int],
    *,
    chars_per_token: int,
    block_tokens: int,
) -> SimPrompt:
    """Lay a request out in tokens.

    Args:
        request: as a worker receives it.
        image_tokens: of each image, in order; 0 while unknown counts the image's marks only.
        chars_per_token: how text is cut.
        block_tokens: tokens of a KV block.
    """
    tokens = [token for piece in _pieces(request, image_tokens, chars_per_token) for token in piece]
    num_tokens = len(tokens)
    tokens += [f"{_GENERATED}{token_id}" for token_id in request.generated_token_ids]
    hashes: list[bytes] = []
    chain = b""
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        block = "\0".join(tokens[start : start + block_tokens]).encode()
        chain = blake2b(block, key=chain, digest_size=_HASH_BYTES).digest()
        hashes.append(chain)
    return SimPrompt(num_tokens, len(tokens) - num_tokens, tuple(hashes))


def prompt_seed(request: ChatRequest, seed: int) -> int:
    """63 bits that follow from what is asked and from `seed`, and from nothing else.

    Neither the request's id nor its URLs matter, so that a second attempt gives the same answer.
    """
    digest = blake2b(repr((seed, request.seed, request.model)).encode(), digest_size=8)
    for piece in _contents(request):
        digest.update(b"\0" + piece.encode())
    return int.from_bytes(digest.digest(), "big") >> 1


def _pieces(
    request: ChatRequest, image_tokens: Sequence[int], chars_per_token: int
) -> Iterator[list[str]]:
    """The tokens of one text or image after the other."""
    sizes = iter(image_tokens)
    for content in _contents(request):
        if content.startswith(_IMAGE):
            yield [content] * (next(sizes) + _IMAGE_MARKS)
        else:
            yield [
                content[start : start + chars_per_token]
                for start in range(0, len(content), chars_per_token)
            ]


def _contents(request: ChatRequest) -> Iterator[str]:
    """Roles, texts and image marks in order; a text cannot be taken for a mark."""
    for message in request.messages:
        yield f"<{message.role}>"
        content = message.content or ""
        for part in [content] if isinstance(content, str) else content:
            if isinstance(part, ImagePart):
                url = part.image_url
                yield _IMAGE + bare_hash(url.content_hash or url.url)
            else:
                yield " " + (part if isinstance(part, str) else part.text)
    yield "<assistant>"
