"""transformers itself on a checkpoint, and the conversations on which it is compared with EPD."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

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
