"""Rows, labels and batches that the training learns from, and its fast forward pass."""

from random import Random

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from epd.checkpoints.pictures import draw_scenes  # noqa: E402
from epd.checkpoints.scenes import (  # noqa: E402
    COLOURS,
    HELD_OUT_CELLS,
    MAX_PIXELS,
    MIN_PIXELS,
    SHAPES,
    cells,
)
from examples.tiny_vl import talk  # noqa: E402
from examples.tiny_vl.batches import MEAN, STD, BatchMaker, cut  # noqa: E402
from examples.tiny_vl.dense import IGNORE, label_cells  # noqa: E402
from examples.tiny_vl.pack import NO_TARGET, Packer, Turn  # noqa: E402
from examples.tiny_vl.tokenizer import VOCAB_SIZE, build_tokenizer  # noqa: E402


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(num_lines=1500)


def test_equal_seeds_give_equal_batches(tokenizer):
    one, two = (BatchMaker(tokenizer, seed=3, budget=1500).make(11, False) for _ in range(2))
    assert np.array_equal(one.rows.ids, two.rows.ids)
    assert all(
        np.array_equal(a.pixels, b.pixels) for a, b in zip(one.pictures, two.pictures, strict=True)
    )


def test_other_seeds_give_other_batches(tokenizer):
    one, two = (BatchMaker(tokenizer, seed, budget=1500).make(11, True) for seed in (3, 4))
    assert one.pictures[0].pixels.tobytes() != two.pictures[0].pixels.tobytes()


def test_no_batch_shows_a_held_out_size(tokenizer):
    maker = BatchMaker(tokenizer, seed=5, budget=1500)
    grids = {
        pictures.pixels.shape[1:3]
        for index in range(150)
        for pictures in maker.make(index, index % 2 == 0).pictures
    }
    assert len(grids) > 5
    assert not {(columns, rows) for rows, columns in grids} & HELD_OUT_CELLS


def test_a_row_reads_as_the_chat_template_writes_it(tokenizer):
    assert len(tokenizer) == VOCAB_SIZE
    row = Packer(tokenizer).chain(
        talk.DEFAULT_SYSTEM, [(1, 1)], [Turn("What is this?", "it is a red star")], shown_at=0
    )
    content = [{"type": "image"}, {"type": "text", "text": "What is this?"}]
    messages = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": "it is a red star"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer(text).input_ids == [*row.ids, *tokenizer("\n").input_ids]
    answer = [token for token in row.targets if token != NO_TARGET]
    assert tokenizer.decode(answer) == "it is a red star<|im_end|>"


def test_the_questions_of_a_tree_stand_at_the_same_positions(tokenizer):
    turns = [Turn("What is this?", "it is a red star"), Turn("What do you see?", "one red star")]
    packer = Packer(tokenizer)
    tree = packer.tree("Be brief.", [(2, 3)], turns)
    for branch, turn in enumerate(turns, start=1):
        alone = packer.chain("Be brief.", [(2, 3)], [turn], shown_at=0)
        picked = [i for i, b in enumerate(tree.branches) if b in (0, branch)]
        assert [tree.ids[i] for i in picked] == alone.ids
        assert [tree.positions[i] for i in picked] == alone.positions


@pytest.mark.parametrize("size", [(101, 76), (56, 56), (148, 121), (448, 300)])
def test_pixels_are_cut_as_the_image_processor_does(size):
    module = pytest.importorskip(
        "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl", exc_type=ImportError
    )
    processor = module.Qwen2VLImageProcessorPil(
        min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS, image_mean=MEAN, image_std=STD
    )
    (scene,) = draw_scenes(Random(1), "count", size=size)
    seen = processor(images=[scene.image], return_tensors="pt")
    _, rows, columns = seen["image_grid_thw"][0].tolist()
    assert cells(size) == (columns // 2, rows // 2)
    pixels = cut(scene.image, rows // 2, columns // 2).reshape(-1, 3, 1, 196) / 255.0
    pixels = (pixels - np.reshape(MEAN, (3, 1, 1))) / np.reshape(STD, (3, 1, 1))
    twice = np.repeat(pixels, 2, axis=2).reshape(rows * columns, -1)
    assert np.abs(twice - seen["pixel_values"].numpy()).max() < 1e-4


def test_labels_name_the_item_at_its_centre():
    rng = Random(2)
    for _ in range(50):
        (scene,) = draw_scenes(rng, "count", size=(224, 168))
        labels = label_cells(scene, 6, 8).reshape(6, 8, -1)
        assert labels[:, :, 0].max() > 0
        centres = labels[labels[:, :, 2] == 1]
        kinds = {(1 + SHAPES.index(i.name), 1 + list(COLOURS).index(i.colour)) for i in scene.items}
        assert {(name, colour) for name, colour, *_ in centres.tolist()} == kinds
        assert (labels[labels[:, :, 0] == 0][:, 1:] == IGNORE).all()


def test_refusals_are_never_asked_about_a_picture():
    rng = Random(0)
    for _ in range(300):
        assert "{" not in talk.draw_request(rng)
