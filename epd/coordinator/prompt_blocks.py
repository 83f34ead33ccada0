"""A request's prompt as a chain of blocks, by which equal beginnings of prompts are known.

The coordinator has no tokenizer, so a block is a piece of text of a fixed length, or what is left
of one at the end of a message, or an image. The blocks of a conversation are thus the first blocks
of the next turn of the same conversation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from epd.pools.routing import Block
from epd.wire.chat import ChatRequest, ImagePart

_CHARS_PER_TOKEN = 4  # of text in most languages; only compared with other estimates
_BLOCK_CHARS = 256
_MAX_CUT_CHARS = 2**20  # of one text; what follows is one block


def prompt_blocks(
    request: ChatRequest, content_hashes: Sequence[str], image_tokens: Mapping[str, int]
) -> list[Block]:
    """The blocks of a request's prompt, in order.

    Args:
        request: what the client sent.
        content_hashes: of its images, in order.
        image_tokens: by content hash.
    """
    # Python's hash differs from process to process, and so a prompt cannot be made to collide.
    chain_hash = hash((request.model, repr((request.model_extra or {}).get("tools"))))
    blocks: list[Block] = []
    for content, num_tokens in _pieces(request, iter(content_hashes), image_tokens):
        chain_hash = hash((chain_hash, content))
        blocks.append(Block(chain_hash, num_tokens))
    return blocks


def _pieces(
    request: ChatRequest, content_hashes: Iterator[str], image_tokens: Mapping[str, int]
) -> Iterator[tuple[object, int]]:
    for index, message in enumerate(request.messages):
        content = message.content or []
        for part in [content] if isinstance(content, str) else content:
            if not isinstance(part, ImagePart):
                text = part if isinstance(part, str) else part.text
                for piece in _cut(text):
                    yield (index, message.role, piece), -(-len(piece) // _CHARS_PER_TOKEN)
            else:
                content_hash = next(content_hashes)
                yield (index, message.role, "image", content_hash), image_tokens[content_hash]


def _cut(text: str) -> Iterator[str]:
    for start in range(0, min(len(text), _MAX_CUT_CHARS), _BLOCK_CHARS):
        yield text[start : start + _BLOCK_CHARS]
    if len(text) > _MAX_CUT_CHARS:
        yield text[_MAX_CUT_CHARS:]
