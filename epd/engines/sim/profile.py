"""How fast a simulated worker is and how much it holds: the numbers, and reading them from a file.

The defaults are the bundled profile, spelled out with comments in configs/profiles/assumed-7b.yaml.
They are assumptions of a plausible size, not measurements.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, model_validator

from encoders import ImageBudget
from epd.config.load import build, read_yaml
from epd.engines.contract.encode_calls import EmbeddingFormat
from epd.wire import KVLayout

_VALUE_BYTES = 2  # bfloat16


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ModelShape(_Section):
    """The sizes of the model that is made believe."""

    model_type: str = "qwen2_5_vl"
    """Family in `encoders/`, whose arithmetic counts image tokens."""
    context_tokens: int = Field(default=32_768, ge=16)
    """Longest prompt plus answer."""
    chars_per_token: int = Field(default=4, ge=1)
    """Text is cut into tokens of so many characters: there is no tokenizer."""
    hidden_size: int = Field(default=3584, ge=1)
    """Width of an image token's embedding."""
    num_layers: int = Field(default=28, ge=1)
    num_kv_heads: int = Field(default=4, ge=1)
    head_dim: int = Field(default=128, ge=1)
    block_tokens: int = Field(default=16, ge=1)
    """Tokens of a KV block, the unit of memory and of prefix hits."""
    patch_size: int = Field(default=14, ge=1)
    merge_size: int = Field(default=2, ge=1)
    """An image token stands for merge_size x merge_size patches."""
    min_pixels: int = Field(default=56 * 56, ge=1)
    max_pixels: int = Field(default=1280 * 28 * 28, ge=1)

    @property
    def image_budget(self) -> ImageBudget:
        return ImageBudget(self.patch_size, self.merge_size, self.min_pixels, self.max_pixels)

    @property
    def block_bytes(self) -> int:
        """KV of one block."""
        token_bytes = self.num_layers * 2 * self.num_kv_heads * self.head_dim * _VALUE_BYTES
        return token_bytes * self.block_tokens

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_tokens)

    @property
    def fingerprint(self) -> str:
        """Differs from every real model's, so that no real engine takes simulated KV."""
        return f"sim-{self.model_type}-{self.num_layers}x{self.hidden_size}"

    @property
    def embedding_format(self) -> EmbeddingFormat:
        return EmbeddingFormat(self.hidden_size, "bfloat16", _VALUE_BYTES, self.fingerprint)

    @property
    def kv_layout(self) -> KVLayout:
        return KVLayout(
            num_layers=self.num_layers,
            block_tokens=self.block_tokens,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype="bfloat16",
            model_fingerprint=self.fingerprint,
        )


class EncodeProfile(_Section):
    """A batch of images takes base_ms + ms_per_image_token for each of its tokens."""

    base_ms: float = Field(default=5.0, ge=0)
    ms_per_image_token: float = Field(default=0.03, ge=0)
    max_batch_image_tokens: int = Field(default=4096, ge=1)
    """A larger image is encoded alone."""
    cache_image_tokens: int = Field(default=200_000, ge=1)
    """Embeddings that fit: those held for prefill workers, and as many cached ones as remain."""
    window: int = Field(default=8, ge=1)
    """Image parts that the coordinator gives a worker at once."""

    def batch_ms(self, num_image_tokens: int) -> float:
        """How long a batch of so many tokens takes."""
        return self.base_ms + self.ms_per_image_token * num_image_tokens


class PrefillProfile(_Section):
    """A prompt takes base_ms + ms_per_uncached_token for each token that is in no cached prefix."""

    base_ms: float = Field(default=8.0, ge=0)
    ms_per_uncached_token: float = Field(default=0.1, ge=0)
    kv_capacity_tokens: int = Field(default=200_000, ge=16)
    """KV that fits: what decode has not taken yet, and as many cached prefixes as remain."""

    def prompt_ms(self, num_tokens: int, num_cached_tokens: int = 0) -> float:
        """How long a prompt takes of which so many tokens are cached."""
        return self.base_ms + self.ms_per_uncached_token * (num_tokens - num_cached_tokens)


class DecodeProfile(_Section):
    """A step takes base_ms + ms_per_sequence for each running one + ms_per_1000_kv_tokens held."""

    base_ms: float = Field(default=8.0, ge=0)
    ms_per_sequence: float = Field(default=0.05, ge=0)
    ms_per_1000_kv_tokens: float = Field(default=0.02, ge=0)
    kv_capacity_tokens: int = Field(default=400_000, ge=16)
    """KV that fits; a request takes its prompt and its longest answer."""
    max_running_requests: int = Field(default=256, ge=1)

    def step_ms(self, num_sequences: int, num_kv_tokens: int) -> float:
        """How long a step of the running batch takes."""
        return (
            self.base_ms
            + self.ms_per_sequence * num_sequences
            + self.ms_per_1000_kv_tokens * num_kv_tokens / 1000
        )


class TransferProfile(_Section):
    """A hand-off takes latency_ms + ms_per_mib; those of one sender follow one another."""

    latency_ms: float = Field(default=0.5, ge=0)
    ms_per_mib: float = Field(default=0.05, ge=0)


class AnswerProfile(_Section):
    """How long answers are: evenly between the two, unless max_tokens is less."""

    min_tokens: int = Field(default=16, ge=1)
    max_tokens: int = Field(default=256, ge=1)
    default_max_tokens: int = Field(default=512, ge=1)
    """`max_tokens` of a request that gives none."""

    @model_validator(mode="after")
    def _min_is_not_above_max(self) -> AnswerProfile:
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})"
            )
        return self


class Profile(_Section):
    """One profile serves all three stages, so that workers of one deployment agree."""

    seed: int = 0
    """Decides answers, and with the worker's name the jitter of its times."""
    time_scale: float = Field(default=1.0, gt=0)
    """Seconds that a second of the profile takes: 0.1 is ten times faster than life."""
    jitter_ratio: float = Field(default=0.0, ge=0, lt=1)
    """Each time is longer or shorter by up to this part of it, evenly."""
    model: ModelShape = ModelShape()
    encode: EncodeProfile = EncodeProfile()
    prefill: PrefillProfile = PrefillProfile()
    decode: DecodeProfile = DecodeProfile()
    transfer: TransferProfile = TransferProfile()
    answer: AnswerProfile = AnswerProfile()


def load_profile(path: Path | None) -> Profile:
    """Read a profile; keys that the file leaves out have their defaults.

    Raises:
        ConfigError: the file cannot be read, or a key is unknown or wrong.
    """
    if path is None:
        return Profile()
    return build(Profile, read_yaml(path), source=str(path))
