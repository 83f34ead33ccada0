"""What the demo asks."""

import base64
import io
from pathlib import Path

import pytest
from PIL import Image

from epd.demo.question import make_question
from epd.errors import ConfigError


def test_a_seed_draws_the_same_question_each_time() -> None:
    first, again, other = (make_question(None, None, seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert first.expected


def test_the_users_picture_has_no_expected_answer(tmp_path: Path) -> None:
    path = tmp_path / "cat.jpg"
    Image.new("RGB", (8, 8)).save(path)
    question = make_question(path, None, 0)
    assert question.expected is None
    assert question.text == "What is in this picture?"
    assert question.pictures[0].mime == "image/jpeg"
    assert question.pictures[0].data == path.read_bytes()


def test_a_question_of_ones_own_about_a_drawn_picture() -> None:
    question = make_question(None, "Which colour?", 0)
    assert (question.text, question.expected, len(question.pictures)) == ("Which colour?", None, 1)


@pytest.mark.parametrize(("content", "reason"), [(None, "No such file"), (b"hello", "no image")])
def test_a_file_that_is_no_picture_is_one_clear_error(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    path = tmp_path / "cat.png"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=reason):
        make_question(path, None, 0)


def test_the_request_is_greedy_and_carries_the_picture() -> None:
    question = make_question(None, None, 3)
    body = question.chat_request("m", max_tokens=5, stream=True)
    assert (body["temperature"], body["max_tokens"], body["stream"]) == (0, 5, True)
    *images, text = body["messages"][0]["content"]
    assert text == {"type": "text", "text": question.text}
    header, _, payload = images[0]["image_url"]["url"].partition(",")
    assert header == "data:image/png;base64"
    with Image.open(io.BytesIO(base64.b64decode(payload))) as image:
        image.load()
