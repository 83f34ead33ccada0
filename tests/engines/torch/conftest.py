"""A tiny checkpoint of each family, our engine on it, and transformers on the same files."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from epd.engines.torch.checkpoint import Checkpoint, load_language, load_vision
from epd.engines.torch.engine import DecodeBatch, DecodeSlot, PrefillModel
from epd.engines.torch.image_processor import ImageProcessor
from epd.engines.torch.kv_pool import KVPool
from epd.engines.torch.prompt import Prompt, PromptTokenizer
from epd.engines.torch.tiny import write_random_checkpoint
from epd.engines.torch.vision import VisionEncoder
from tests.reference import CASES, NUM_TOKENS, Case, Reference


class Engine:
    """The three stages of the torch engine in one process."""

    def __init__(self, path: Path) -> None:
        self.checkpoint = Checkpoint(path)
        self.prompts = PromptTokenizer(path)
        self.vision = VisionEncoder(load_vision(path, "cpu"), ImageProcessor(path), max_patches=300)
        self.model = load_language(path, "cpu")
        self.pool = self.new_pool()
        self.prefill = PrefillModel(self.model, self.pool, self.checkpoint.image_token_id)

    def new_pool(self, num_blocks: int = 512) -> KVPool:
        """A pool full of NaN: whoever reads what was never written will show it."""
        shape = self.checkpoint.language.kv_shape(torch.float32)
        buffer = torch.full((num_blocks * shape.block_bytes // 4,), torch.nan).view(torch.uint8)
        return KVPool(buffer, shape)

    def prepare(self, case: Case) -> tuple[Prompt, torch.Tensor | None]:
        tokens = self.prompts.tokenize(case.messages)
        embeddings = self.vision.encode(case.images)
        prompt = self.prompts.expand(tokens, [e.grid for e in embeddings])
        return prompt, torch.cat([e.values for e in embeddings]) if embeddings else None

    def start(self, case: Case, chunk_tokens: int = 2048) -> DecodeSlot:
        """Encode and prefill; the slot's token is the first of the answer."""
        prompt, embeddings = self.prepare(case)
        num_tokens = len(prompt.token_ids)
        block_ids = self.pool.allocate(num_tokens + NUM_TOKENS)
        assert block_ids is not None
        logits = self.prefill.prefill(prompt, embeddings, block_ids, chunk_tokens)
        return DecodeSlot(int(logits.argmax()), prompt.next_position, num_tokens, block_ids)

    def decode(
        self, slots: Sequence[DecodeSlot], num_tokens: int, pool: KVPool | None = None
    ) -> list[list[int]]:
        """The slots' present tokens and those that follow, `num_tokens` each."""
        answers = [[slot.token_id] for slot in slots]
        batch = DecodeBatch(self.model, pool or self.pool)
        for _ in range(num_tokens - 1):
            for answer, token_id in zip(answers, batch.step(slots), strict=True):
                answer.append(token_id)
        return answers

    def generate(self, case: Case, chunk_tokens: int = 2048) -> list[int]:
        slot = self.start(case, chunk_tokens)
        try:
            return self.decode([slot], NUM_TOKENS)[0]
        finally:
            self.pool.free(slot.block_ids)


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session", params=["qwen2_5_vl", "qwen2_vl"])
def checkpoint_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp(request.param)
    # Of the first seeds, the one with the widest gaps between best and second token (8e-3).
    write_random_checkpoint(path, request.param, seed=1)
    return path


@pytest.fixture(scope="session")
def reference(checkpoint_path: Path) -> Reference:
    return Reference(checkpoint_path)


@pytest.fixture(scope="session")
def engine(checkpoint_path: Path) -> Engine:
    return Engine(checkpoint_path)


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture
def all_cases() -> list[Case]:
    return list(CASES.values())
