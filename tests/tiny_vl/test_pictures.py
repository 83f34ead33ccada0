"""The pictures and questions: the same from the same seed, and worded right."""

import hashlib
from random import Random

import pytest

from epd.checkpoints import scenes
from epd.checkpoints.pictures import KINDS, Question, amount, ask_about, draw_question, draw_scenes

EXPECTED_WORDS = ("What is the number of white stars?", "five white stars")
EXPECTED_DIGEST = "2944ee35dc851a51"


def _digest(question: Question) -> str:
    digest = hashlib.sha256()
    for image in question.images:
        digest.update(repr(image.size).encode() + image.tobytes())
    return digest.hexdigest()[:16]


@pytest.mark.parametrize("kind", KINDS)
def test_equal_seeds_give_equal_pixels_and_words(kind):
    one, two = draw_question(5, kind), draw_question(5, kind)
    assert (one.prompt, one.answer, one.kind) == (two.prompt, two.answer, kind)
    assert _digest(one) == _digest(two)


def test_the_pixels_of_a_seed_never_change():
    question = draw_question(2026, "count", size=(112, 84))
    assert (question.prompt, question.answer) == EXPECTED_WORDS
    assert _digest(question) == EXPECTED_DIGEST


def test_other_seeds_give_other_pictures():
    assert len({_digest(draw_question(seed)) for seed in range(50)}) == 50


def test_only_a_comparison_has_two_pictures():
    for kind in KINDS:
        assert len(draw_question(3, kind).images) == (2 if kind == "compare" else 1)


def test_sizes_stay_in_bounds_and_leave_the_held_out_size_alone():
    rng = Random(0)
    for _ in range(2000):
        width, height = scenes.draw_size(rng)
        assert min(width, height) >= scenes.MIN_IMAGE_PX
        assert max(width, height) <= scenes.MAX_IMAGE_PX
        assert scenes.cells((width, height)) not in scenes.HELD_OUT_CELLS


def test_a_size_that_is_asked_for_is_drawn():
    assert draw_question(1, "compare", size=(196, 140)).images[1].size == (196, 140)


@pytest.mark.parametrize("size", [(56, 56), (56, 100), (448, 448)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_can_be_asked_at_every_size(kind, size):
    for seed in range(10):
        question = draw_question(seed, kind, size)
        assert question.prompt and question.answer
        assert all(image.size == size for image in question.images)


def test_items_do_not_overlap_and_lie_inside():
    rng = Random(4)
    for _ in range(200):
        (scene,) = draw_scenes(rng, "count")
        width, height = scene.image.size
        boxes = [item.box for item in scene.items]
        for index, (left, top, right, bottom) in enumerate(boxes):
            assert left >= 0 and top >= 0 and right <= width + 1e-6 and bottom <= height + 1e-6
            for other in boxes[:index]:
                assert (
                    right <= other[0] or left >= other[2] or bottom <= other[1] or top >= other[3]
                )


def test_the_relation_is_that_of_the_boxes():
    rng = Random(9)
    for _ in range(200):
        (scene,) = draw_scenes(rng, "relation")
        one, other = (item.box for item in scene.items)
        is_true = {
            "left of": one[2] <= other[0],
            "right of": one[0] >= other[2],
            "above": one[3] <= other[1],
            "below": one[1] >= other[3],
        }
        assert is_true[scene.relation], (scene.relation, one, other)


def test_the_answer_to_a_count_is_the_number_of_items():
    rng = Random(7)
    for _ in range(100):
        (scene,) = draw_scenes(rng, "count")
        first = scene.items[0]
        number = sum((i.name, i.colour) == (first.name, first.colour) for i in scene.items)
        (ask,) = [ask for ask in ask_about(rng, [scene]) if ask.kind == "count"]
        assert ask.answer == amount(number, first.colour, first.name)


def test_amounts_are_put_in_words():
    assert amount(1, "red", "cross") == "one red cross"
    assert amount(5, "blue", "cross") == "five blue crosses"


def test_a_comparison_says_what_it_saw_before_its_verdict():
    verdicts = {"yes": 0, "no": 0}
    for seed in range(400):
        question = draw_question(seed, "compare")
        if not question.prompt.startswith(("Are both", "Do both")):
            continue
        seen, verdict = question.answer.rsplit(", so ", 1)
        first, second = seen.split(" and the second ")
        is_same = first.split()[-1] == second.split()[-1]
        assert verdict == ("yes" if is_same else "no"), question.answer
        verdicts[verdict] += 1
    assert min(verdicts.values()) > 20
