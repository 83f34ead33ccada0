"""Builds a torch worker: from its configuration to a stage behind the shell.

All memory that peers may write to or read from is allocated and registered here, once.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from epd.config import WorkerConfig
from epd.engines.contract.context_limits import ContextLimits
from epd.engines.shell import Shell, StageWorker
from epd.engines.torch.checkpoint import (
    Checkpoint,
    default_dtype,
    load_language,
    load_vision,
    num_parameters,
)
from epd.engines.torch.decode_loop import DecodeLoop
from epd.engines.torch.decode_worker import DecodeWorker
from epd.engines.torch.embedding_intake import EmbeddingIntake
from epd.engines.torch.embedding_store import EmbeddingStore
from epd.engines.torch.encode_batches import EncodeBatches
from epd.engines.torch.encode_worker import EncodeWorker
from epd.engines.torch.engine import DecodeBatch, PrefillModel
from epd.engines.torch.image_processor import ImageProcessor
from epd.engines.torch.kv_intake import KVIntake
from epd.engines.torch.kv_lender import KVLender
from epd.engines.torch.kv_pool import KVPool
from epd.engines.torch.kv_stage import KVStage
from epd.engines.torch.language_model import LanguageModel
from epd.engines.torch.memory import registered_buffer
from epd.engines.torch.prefill_worker import PrefillWorker
from epd.engines.torch.prefiller import Prefiller
from epd.engines.torch.prompt import PromptTokenizer
from epd.engines.torch.vision import VisionEncoder
from epd.errors import ConfigError
from epd.own_thread import in_own_thread
from epd.transfer import Arena, TransferEngine
from epd.types import Stage
from epd.wire import KVLayout, ModelCard

T = TypeVar("T")
_MIN_CONTEXT_TOKENS = 16
_DEFAULT_POOL_RATIO = 1 / 8
_MIN_DEFAULT_NEW_TOKENS = 256


def model_card(config: WorkerConfig, path: Path) -> ModelCard:
    """What the worker will serve, from the checkpoint's small files only.

    Raises:
        ConfigError: the checkpoint cannot be served, or the memory is too small for it.
    """
    checkpoint = Checkpoint(path)
    if config.device != "cpu":
        _check_device(config.device)
    return ModelCard(
        model_id=config.served_model_name or path.name,
        model_type=checkpoint.model_type,
        context_tokens=_context_tokens(config, checkpoint),
        image_budget=checkpoint.image_budget,
    )


async def build_stage(
    config: WorkerConfig, path: Path, shell: Shell, transfer: TransferEngine
) -> StageWorker:
    """Load the stage's weights and build the stage around them.

    Cancelled while it loads it returns at once; a thread then reads on for nothing.

    Raises:
        ConfigError: the checkpoint's weights cannot be read.
    """
    await shell.compute.run(_limit_threads, config)
    match config.stage:
        case Stage.ENCODE:
            return await _build_encode(config, path, shell, transfer)
        case Stage.PREFILL:
            return await _build_prefill(config, path, shell, transfer)
        case Stage.DECODE:
            return await _build_decode(config, path, shell, transfer)


async def _build_encode(
    config: WorkerConfig, path: Path, shell: Shell, transfer: TransferEngine
) -> EncodeWorker:
    checkpoint = Checkpoint(path)
    tower, processor = await _load(config, checkpoint, _read_vision)
    buffer = registered_buffer(config.embedding_bytes, config.device, transfer)
    store = EmbeddingStore(buffer.data_ptr(), buffer.numel(), shell.clock)
    return EncodeWorker(
        shell,
        processor=processor,
        batches=EncodeBatches(
            VisionEncoder(tower, processor),
            compute=shell.compute,
            clock=shell.clock,
            metrics=shell.metrics,
            device=config.device,
        ),
        store=store,
        buffer=buffer,
        transfer=transfer,
        budget=checkpoint.image_budget,
        hidden_size=checkpoint.language.hidden_size,
        dtype=default_dtype(config.device),
        fingerprint=checkpoint.fingerprint,
        num_parameters=num_parameters(tower),
        timeout_s=config.request_timeout_s,
    )


async def _build_prefill(
    config: WorkerConfig, path: Path, shell: Shell, transfer: TransferEngine
) -> PrefillWorker:
    checkpoint = Checkpoint(path)
    model, tokenizer = await _load(config, checkpoint, _read_language)
    kv = _build_kv(config, checkpoint, model, shell, transfer)
    landing = registered_buffer(config.embedding_bytes, config.device, transfer)
    intake = EmbeddingIntake(
        shell,
        arena=Arena(landing.data_ptr(), landing.numel(), clock=shell.clock),
        buffer=landing,
        transfer=transfer,
        hidden_size=checkpoint.language.hidden_size,
        dtype=default_dtype(config.device),
        fingerprint=checkpoint.fingerprint,
        timeout_s=config.request_timeout_s,
    )
    prefiller = Prefiller(
        shell,
        tokenizer=tokenizer,
        model=PrefillModel(model, kv.lender.pool, checkpoint.image_token_id),
        intake=intake,
        lender=kv.lender,
        limits=_limits(config, checkpoint, kv.lender.pool),
        mint_seed=lambda: secrets.randbits(63),
        chunk_tokens=config.chunk_tokens,
        timeout_s=config.request_timeout_s,
    )
    return PrefillWorker(
        shell,
        prefiller=prefiller,
        kv=kv,
        intake=intake,
        timeout_s=config.request_timeout_s,
    )


async def _build_decode(
    config: WorkerConfig, path: Path, shell: Shell, transfer: TransferEngine
) -> DecodeWorker:
    checkpoint = Checkpoint(path)
    model, tokenizer = await _load(config, checkpoint, _read_language)
    kv = _build_kv(config, checkpoint, model, shell, transfer)
    return DecodeWorker(
        shell,
        tokenizer=tokenizer.tokenizer,
        eos_token_ids=checkpoint.eos_token_ids,
        kv=kv,
        intake=KVIntake(
            peers=shell.peers,
            lender=kv.lender,
            transfer=transfer,
            layout=kv.layout,
            metrics=shell.metrics,
            timeout_s=config.request_timeout_s,
        ),
        loop=DecodeLoop(
            DecodeBatch(model, kv.lender.pool),
            compute=shell.compute,
            clock=shell.clock,
            metrics=shell.metrics,
            eos_token_ids=checkpoint.eos_token_ids,
            max_running=config.max_running_requests,
        ),
        limits=_limits(config, checkpoint, kv.lender.pool),
        timeout_s=config.request_timeout_s,
    )


async def _load(
    config: WorkerConfig, checkpoint: Checkpoint, read: Callable[[WorkerConfig, Path], T]
) -> T:
    """What `read` reads, which takes long and cannot be interrupted: not in the compute thread."""

    def run() -> T:
        _limit_threads(config)
        _ = checkpoint.fingerprint  # kept; reads from each weight file
        return read(config, checkpoint.path)

    return await in_own_thread(run, name="load")


def _read_vision(config: WorkerConfig, path: Path) -> tuple[PreTrainedModel, ImageProcessor]:
    return load_vision(path, config.device), ImageProcessor(path)


def _read_language(config: WorkerConfig, path: Path) -> tuple[LanguageModel, PromptTokenizer]:
    return load_language(path, config.device), PromptTokenizer(path)


def _limit_threads(config: WorkerConfig) -> None:
    """For the calling thread, which computes: its setting does not reach the others."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)


def _build_kv(
    config: WorkerConfig,
    checkpoint: Checkpoint,
    model: LanguageModel,
    shell: Shell,
    transfer: TransferEngine,
) -> KVStage:
    shape = checkpoint.language.kv_shape(default_dtype(config.device))
    buffer = registered_buffer(config.kv_bytes, config.device, transfer)
    layout = KVLayout(
        num_layers=shape.num_layers,
        block_tokens=shape.block_tokens,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=str(shape.dtype).removeprefix("torch."),
        model_fingerprint=checkpoint.fingerprint,
    )
    lender = KVLender(KVPool(buffer, shape), shell.clock)
    return KVStage(shell, lender, transfer, layout, num_parameters(model))


def _limits(config: WorkerConfig, checkpoint: Checkpoint, pool: KVPool) -> ContextLimits:
    default = max(_MIN_DEFAULT_NEW_TOKENS, int(pool.max_tokens * _DEFAULT_POOL_RATIO))
    return ContextLimits(_context_tokens(config, checkpoint), default)


def _context_tokens(config: WorkerConfig, checkpoint: Checkpoint) -> int:
    """The model's limit or the operator's, and never more than the KV pool can hold."""
    context_tokens = min(
        config.context_tokens or checkpoint.context_tokens, checkpoint.context_tokens
    )
    if config.stage is Stage.ENCODE:
        return context_tokens
    shape = checkpoint.language.kv_shape(default_dtype(config.device))
    pool_tokens = config.kv_bytes // shape.block_bytes * shape.block_tokens
    if pool_tokens < _MIN_CONTEXT_TOKENS:
        raise ConfigError(
            f"kv_bytes {config.kv_bytes} holds {pool_tokens} tokens of this model "
            f"({shape.block_bytes} bytes for {shape.block_tokens}): give it more"
        )
    return min(context_tokens, pool_tokens)


def _check_device(device: str) -> None:
    if not torch.cuda.is_available():
        raise ConfigError(f"device {device}: torch finds no GPU here; use --device cpu")
    index = torch.device(device).index or 0
    if index >= torch.cuda.device_count():
        raise ConfigError(f"device {device}: there are {torch.cuda.device_count()} GPUs here")
