"""The shipped checkpoint: its files, its size, and that it sees."""

import json
from random import Random

import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from epd.checkpoints import resolve  # noqa: E402
from epd.checkpoints.scenes import CELL_PX, MAX_PIXELS, MIN_PIXELS  # noqa: E402
from examples.tiny_vl import talk  # noqa: E402
from examples.tiny_vl.answer import Answerer  # noqa: E402
from examples.tiny_vl.evaluate import held_out, score  # noqa: E402

SHIPPED = resolve("tiny-vl")
MAX_BYTES = 8_000_000
MAX_WRONG_OF_50 = 5


@pytest.fixture(scope="module")
def answerer():
    return Answerer(SHIPPED)


def _read(name):
    return json.loads((SHIPPED / name).read_text(encoding="utf-8"))


def test_it_is_a_qwen2_5_vl_in_hub_layout():
    config = _read("config.json")
    assert config["architectures"] == ["Qwen2_5_VLForConditionalGeneration"]
    assert config["model_type"] == "qwen2_5_vl"
    assert {path.name for path in SHIPPED.iterdir()} >= {
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json"),
        *("tokenizer_config.json", "chat_template.jinja", "preprocessor_config.json"),
    }


def test_it_is_small_enough_to_ship():
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) <= MAX_BYTES


def test_its_vocabulary_is_that_of_its_tokenizer():
    tokenizer = transformers.AutoTokenizer.from_pretrained(SHIPPED)
    assert _read("config.json")["text_config"]["vocab_size"] == len(tokenizer)
    ids = tokenizer("naïve 47 <|im_start|>é").input_ids
    assert max(ids) < len(tokenizer)
    assert tokenizer.decode(ids) == "naïve 47 <|im_start|>é"


def test_its_image_processor_is_the_one_it_was_trained_with():
    processor = _read("preprocessor_config.json")
    assert (processor["min_pixels"], processor["max_pixels"]) == (MIN_PIXELS, MAX_PIXELS)
    vision = _read("config.json")["vision_config"]
    assert processor["patch_size"] == vision["patch_size"]
    assert processor["merge_size"] == vision["spatial_merge_size"]
    assert processor["patch_size"] * processor["merge_size"] == CELL_PX


def test_it_answers_fifty_held_out_questions(answerer):
    scores = score(answerer, held_out(seed=50, num=50))
    wrong = [s for s in scores if not s.is_right]
    assert len(wrong) <= MAX_WRONG_OF_50, wrong


def test_it_greets_and_refuses_without_a_picture(answerer):
    rng = Random("chat test")
    chats = [talk.draw_chat(rng) for _ in range(20)]
    right = sum(answerer.answer((), chat.prompt) == chat.answer for chat in chats)
    assert right >= 18


def test_a_second_turn_refers_to_the_picture_of_the_first(answerer):
    right = 0
    for question in held_out(seed=51, num=30):
        if question.kind in ("compare", "presence"):
            continue
        content = [{"type": "image"}, {"type": "text", "text": question.prompt}]
        messages = [
            {"role": "system", "content": "Answer in one short sentence."},
            {"role": "user", "content": content},
            {"role": "assistant", "content": question.answer},
            {"role": "user", "content": "Write a poem about love."},
        ]
        if answerer.reply(question.images, messages) == talk.REFUSAL:
            messages[-1] = {"role": "assistant", "content": talk.REFUSAL}
            messages.append({"role": "user", "content": question.prompt})
            right += answerer.reply(question.images, messages) == question.answer
    assert right >= 18
