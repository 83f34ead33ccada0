"""Greedy output is token-identical to transformers' on the same checkpoint."""

import dataclasses
from typing import Any

import pytest
import torch

from epd.engines.torch.engine import DecodeSlot
from epd.engines.torch.sampler import Sampling
from epd.errors import WorkerError

NUM_TOKENS = 32


def test_prompts_and_positions_equal_those_of_transformers(engine: Any, reference: Any, case: Any):
    inputs = reference.inputs(case)
    prompt, _ = engine.prepare(case)
    assert prompt.token_ids == inputs["input_ids"][0].tolist()
    positions, deltas = reference.model.model.get_rope_index(
        inputs["input_ids"],
        mm_token_type_ids=inputs["mm_token_type_ids"],
        image_grid_thw=inputs.get("image_grid_thw"),
    )
    assert prompt.positions == positions[:, 0].tolist()
    assert prompt.next_position == len(prompt.token_ids) + int(deltas[0])


def test_greedy_answers_equal_those_of_transformers(engine: Any, reference: Any, case: Any):
    expected = reference.generate(case)
    assert len(set(expected)) > 5, "an answer that repeats itself proves little"
    assert engine.generate(case) == expected


def test_a_decode_batch_of_all_conversations_answers_each_as_alone(
    engine: Any, reference: Any, all_cases: list[Any]
):
    assert len(all_cases) == 8
    slots = [engine.start(case) for case in all_cases]
    answers = engine.decode(slots, NUM_TOKENS)
    for slot in slots:
        engine.pool.free(slot.block_ids)
    assert answers == [reference.generate(case) for case in all_cases]


def test_sequences_may_join_and_leave_a_running_batch(engine: Any, all_cases: list[Any]):
    alone = [engine.generate(case) for case in all_cases[:3]]
    slots = [engine.start(case) for case in all_cases[:3]]
    first = engine.decode(slots[:2], 5)
    second = engine.decode([slots[2], slots[1]], 7)
    third = engine.decode([slots[0], slots[2]], 9)
    for slot in slots:
        engine.pool.free(slot.block_ids)
    assert first[0][:-1] + third[0] == alone[0][:13]
    assert first[1][:-1] + second[1] == alone[1][:11]
    assert second[0][:-1] + third[1] == alone[2][:15]


@pytest.mark.parametrize("chunk_tokens", [1, 7, 16, 33])
def test_chunked_prefill_gives_the_logits_of_one_chunk(
    engine: Any, all_cases: list[Any], chunk_tokens: int
):
    for case in all_cases[2:6]:
        prompt, embeddings = engine.prepare(case)
        blocks = engine.pool.allocate(len(prompt.token_ids))
        whole = engine.prefill.prefill(prompt, embeddings, blocks, len(prompt.token_ids))
        chunked = engine.prefill.prefill(prompt, embeddings, blocks, chunk_tokens)
        engine.pool.free(blocks)
        torch.testing.assert_close(chunked, whole, rtol=1e-4, atol=1e-4)


def test_an_answer_after_chunked_prefill_equals_that_of_transformers(
    engine: Any, reference: Any, case: Any
):
    assert engine.generate(case, chunk_tokens=5) == reference.generate(case)


def test_kv_copied_block_by_block_to_another_pool_continues_identically(
    engine: Any, all_cases: list[Any]
):
    case = all_cases[4]
    expected = engine.generate(case)
    slot = engine.start(case)
    other = engine.new_pool()
    assert other.allocate(3 * 16) is not None  # so that block ids differ
    block_ids = other.allocate(slot.num_tokens + NUM_TOKENS)
    num_filled = other.shape.num_blocks(slot.num_tokens)
    for source, target in zip(slot.block_ids[:num_filled], block_ids, strict=False):
        other.block(target).copy_(engine.pool.block(source))
    engine.pool.free(slot.block_ids)
    moved = DecodeSlot(slot.token_id, slot.position, slot.num_tokens, block_ids)
    assert engine.decode([moved], NUM_TOKENS, other)[0] == expected


def test_nothing_is_left_in_the_pool(engine: Any, case: Any):
    engine.generate(case)
    assert engine.pool.num_used_blocks == 0


def test_embeddings_that_do_not_fit_the_prompt_are_refused(engine: Any, all_cases: list[Any]):
    prompt, embeddings = engine.prepare(all_cases[2])
    with pytest.raises(WorkerError, match="image tokens"):
        engine.prefill.prefill(prompt, embeddings[1:], [0] * 64, 512)
    with pytest.raises(WorkerError, match="0 rows"):
        engine.prefill.prefill(prompt, None, [0] * 64, 512)


def test_the_answer_depends_on_every_image_and_on_their_order(engine: Any, all_cases: list[Any]):
    case = all_cases[3]
    left, right = case.images
    answers = [
        engine.generate(dataclasses.replace(case, images=images))
        for images in ([left, right], [right, left], [left, left], [right, right])
    ]
    assert len({tuple(answer) for answer in answers}) == 4


def test_sampled_answers_do_not_depend_on_the_batch(engine: Any, all_cases: list[Any]):
    def slots_of(cases: list[Any]) -> list[DecodeSlot]:
        slots = [engine.start(case) for case in cases]
        for seed, slot in enumerate(slots):
            slot.sampling = Sampling(temperature=0.8, top_p=0.9, seed=seed)
        return slots

    together = slots_of(all_cases[:4])
    answers = engine.decode(together, NUM_TOKENS)
    alone = slots_of(all_cases[:4])
    assert answers == [engine.decode([slot], NUM_TOKENS)[0] for slot in alone]
    for slot in together + alone:
        engine.pool.free(slot.block_ids)
    assert answers[0] != engine.generate(all_cases[0]), "sampling made no difference"
