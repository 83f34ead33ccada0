"""A tiny checkpoint of each family, our engine on it, and transformers on the same files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from epd.engines.torch.checkpoint import Checkpoint, load_language, load_vision
from epd.engines.torch.engine import DecodeBatch, DecodeSlot, PrefillModel
from epd.engines.torch.image_processor import ImageProcessor
from epd.engines.torch.kv_pool import KVPool
from epd.engines.torch.prompt import Prompt, PromptTokenizer
from epd.engines.torch.tiny import write_random_checkpoint
from epd.engines.torch.vision import VisionEncoder

Message = dict[str, Any]
NUM_TOKENS = 32


@dataclass(frozen=True)
class Case:
    """One conversation and its pictures, in order."""

    messages: list[Message]
    images: list[Image.Image]


class Reference:
    """transformers itself: its image processor, tokenizer, positions and `generate`."""

    def __init__(self, path: Path) -> None:
        self.model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
        self.model.generation_config.eos_token_id = None  # answers of full length say more
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.processor = Qwen2VLImageProcessorPil.from_pretrained(path)

    def inputs(self, case: Case) -> dict[str, torch.Tensor]:
        messages = [{**m, "content": _with_image_parts(m["content"])} for m in case.messages]
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        extra: dict[str, torch.Tensor] = {}
        if case.images:
            extra = dict(self.processor(images=case.images, return_tensors="pt"))
            merged = self.processor.merge_size**2
            pieces = text.split("<|image_pad|>")
            for i, grid in enumerate(extra["image_grid_thw"]):
                pieces[i] += "<|image_pad|>" * (int(grid.prod()) // merged)
            text = "".join(pieces)
        ids = self.tokenizer(text, return_tensors="pt")
        is_image = ids["input_ids"] == self.model.config.image_token_id
        return {**ids, **extra, "mm_token_type_ids": is_image.int()}

    def generate(self, case: Case, num_tokens: int = NUM_TOKENS) -> list[int]:
        inputs = self.inputs(case)
        output = self.model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False)
        return output[0, inputs["input_ids"].shape[1] :].tolist()


def _with_image_parts(content: Any) -> Any:
    if isinstance(content, str):
        return content
    return [part if part["type"] == "text" else {"type": "image"} for part in content]


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


def picture(width: int, height: int, seed: int) -> Image.Image:
    noise = torch.randint(0, 256, (5, 5, 3), generator=torch.Generator().manual_seed(seed))
    coarse = Image.fromarray(noise.to(torch.uint8).numpy())
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


def user(*parts: str | None) -> Message:
    """A user's message; None is a picture."""
    content = [
        {"type": "image_url", "image_url": {"url": "data:,"}}
        if part is None
        else {"type": "text", "text": part}
        for part in parts
    ]
    return {"role": "user", "content": content}


CASES = {
    "text only": Case([{"role": "user", "content": "What is a picture?"}], []),
    "a system message": Case(
        [{"role": "system", "content": "Answer in one word."}, user("How many?")], []
    ),
    "one image": Case([user(None, "What is in this picture?")], [picture(60, 40, 1)]),
    "two adjacent images": Case(
        [user(None, None, "Compare the two.")], [picture(48, 48, 2), picture(90, 30, 3)]
    ),
    "three images of different sizes between text": Case(
        [user("First ", None, " then ", None, " and last ", None, ". Which is largest?")],
        [picture(30, 70, 4), picture(200, 150, 5), picture(17, 9, 6)],
    ),
    "a second turn on an earlier image": Case(
        [
            user("Look: ", None),
            {"role": "assistant", "content": "A red square, naïve café 漢字 🙂."},
            user("Is it larger than this?", None),
            {"role": "assistant", "content": "No."},
            {"role": "user", "content": "What about the first?"},
        ],
        [picture(64, 32, 7), picture(33, 65, 8)],
    ),
    "the same image twice": Case(
        [user(None, "or", None)], [picture(50, 50, 9), picture(50, 50, 9)]
    ),
    "a sliver": Case([user("  \n\nWide?  ", None, "\n")], [picture(300, 3, 10)]),
}


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture
def all_cases() -> list[Case]:
    return list(CASES.values())
