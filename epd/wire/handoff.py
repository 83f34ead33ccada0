"""Hand-offs between workers: embeddings (encode to prefill) and KV (prefill to decode).

Both are driven by the receiver: it allocates when it has room, then asks the holder to write
there. Addresses are absolute addresses in the receiver's registered arena; `session_id` names the
receiver's transfer engine.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

_HASH_PREFIX = "sha256:"
_PART_MARK = "_local_part_"


def wire_hash(content_hash: str) -> str:
    """A hex SHA-256 as SGLang spells it (multimodal/cache/identity.py, 0.5.23)."""
    return _HASH_PREFIX + content_hash


def bare_hash(text: str) -> str:
    """The hex of a content hash, with or without SGLang's prefix."""
    return text.removeprefix(_HASH_PREFIX).lower()


def part_id(rid: str, part_idx: int) -> str:
    """The `req_id` of one image part of request `rid`, as SGLang's receiver makes it."""
    return f"{rid}{_PART_MARK}{part_idx}"


def rid_of(req_id: str) -> str:
    """The request that a part belongs to."""
    return req_id.rsplit(_PART_MARK, 1)[0]


class _Message(BaseModel):
    # SGLang adds fields between releases; a reader ignores what it does not know.
    model_config = ConfigDict(extra="ignore")


class EncodeRequest(_Message):
    """`POST /encode`: encode the images of one part. SGLang: disaggregation/encoder/receiver.py.

    `req_id` is a `part_id`. An item is a URL, or an object with `url` and perhaps `content_hash`
    (`sha256:` and the hex SHA-256 of the file) and `detail`.
    """

    req_id: str = Field(min_length=1)
    mm_items: list[str | dict[str, Any]] = Field(min_length=1)
    modality: str = "IMAGE"
    num_parts: int = Field(ge=1)
    part_idx: int = Field(ge=0)

    @property
    def content_hashes(self) -> tuple[str, ...]:
        """The hex hash of each item, in order; empty if one of them has none."""
        found = [item.get("content_hash") for item in self.mm_items if isinstance(item, dict)]
        hashes = tuple(bare_hash(value) for value in found if isinstance(value, str))
        return hashes if len(hashes) == len(self.mm_items) else ()


class EncodeResponse(_Message):
    """Sizes of an encoded part, as `/scheduler_receive_meta_data` also gives them.

    `grids` is EPD's addition: (t, h, w) in patches for each image of the part, from which the
    prefill worker expands placeholders and computes M-RoPE positions.
    """

    req_id: str
    part_idx: int
    embedding_size: int
    """bytes"""
    embedding_len: int
    """image tokens"""
    embedding_dim: int
    """hidden size"""
    grids: list[tuple[int, int, int]] = []
    dtype: str = "float32"
    model_fingerprint: str = ""
    """EPD's addition: prefill refuses embeddings of another model, if the encoder says which."""


MetadataResponse = EncodeResponse


class MetadataRequest(_Message):
    """`POST /scheduler_receive_meta_data`: wait until the part is encoded, then say its sizes."""

    req_id: str = Field(min_length=1)
    part_idx: int = Field(default=0, ge=0)


class ReceiverRequest(_Message):
    """`POST /scheduler_receive_url`: push the part's embeddings to `receive_url` when encoded.

    One call comes from each of the `receive_count` ranks of the prefill server.
    """

    req_id: str = Field(min_length=1)
    receive_count: int = Field(ge=1)
    receive_url: str = Field(min_length=1)


class SendRequest(_Message):
    """`POST /send`: write the part's embeddings to `buffer_address` of `session_id`."""

    req_id: str = Field(min_length=1)
    part_idx: int = Field(default=0, ge=0)
    session_id: str = Field(min_length=1)
    buffer_address: int = Field(ge=0)
    receive_count: int = Field(default=1, ge=1)
    accepts_replay: bool = False
    """The receiver keeps the buffer from others for a while if `is_replayed` comes back, so that
    another worker may write there after one that failed midway. SGLang's does not."""


class SendResponse(_Message):
    """What was written, for the receiver's timeline."""

    nbytes: int = 0
    duration_s: float = 0.0
    is_replayed: bool = False
    """Another worker had been told to write before; its bytes may still land."""


class KVLayout(_Message):
    """Shape of one KV block: `[num_layers, 2, block_tokens, num_kv_heads, head_dim]`.

    Prefill and decode must agree on every field, and on `model_fingerprint`, or the decode worker
    refuses the hand-off: a silent mismatch would give garbage (sglang#15674, #9266).
    """

    num_layers: int
    block_tokens: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    model_fingerprint: str


class RoomDescriptor(_Message):
    """`GET /bootstrap/rooms/{room}` on the prefill worker: what decode needs to take over.

    The answer comes when prefill is done (long poll), or as an error when it failed.
    """

    version: int = 1
    room: int
    generation: int
    """Tags this use of the room; `/send` must repeat it, so a late message cannot match."""
    num_prompt_tokens: int
    num_generated_tokens: int = 0
    """Tokens of the answer that the request continues from; their KV follows the prompt's."""
    next_position: int
    """M-RoPE position of the first token (images take fewer positions than tokens)."""
    first_token_id: int
    """The token that follows those whose KV is here."""
    seed: int
    """Seed of the sampler, so that decode continues the sequence prefill began."""
    num_blocks: int
    layout: KVLayout

    @property
    def num_kv_tokens(self) -> int:
        """Tokens whose KV the room holds."""
        return self.num_prompt_tokens + self.num_generated_tokens


class RoomSendRequest(_Message):
    """`POST /bootstrap/rooms/{room}/send`: write the room's KV blocks to these addresses."""

    version: int = 1
    generation: int
    session_id: str = Field(min_length=1)
    block_addresses: list[int] = Field(min_length=1)
