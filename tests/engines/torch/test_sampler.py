from collections import Counter

import torch

from epd.engines.torch.sampler import GREEDY, Sampling, sample, uniform

PROBS = torch.tensor([0.05, 0.5, 0.2, 0.25])
LOGITS = PROBS.log()


def draws(how: Sampling, count: int = 4000) -> Counter[int]:
    rows = LOGITS.expand(count, -1)
    return Counter(sample(rows, [how] * count, range(count)))


def test_temperature_zero_takes_the_most_likely_token():
    assert draws(GREEDY, 50) == {1: 50}


def test_frequencies_follow_the_probabilities():
    counts = draws(Sampling())
    for token_id, prob in enumerate(PROBS.tolist()):
        assert abs(counts[token_id] / 4000 - prob) < 0.03


def test_temperature_sharpens_and_flattens():
    sharp, flat = draws(Sampling(temperature=0.5)), draws(Sampling(temperature=2.0))
    for counts, temperature in ((sharp, 0.5), (flat, 2.0)):
        expected = (LOGITS / temperature).softmax(-1).tolist()
        for token_id, prob in enumerate(expected):
            assert abs(counts[token_id] / 4000 - prob) < 0.03


def test_top_p_keeps_the_fewest_tokens_that_reach_it():
    assert set(draws(Sampling(top_p=0.7))) == {1, 3}
    assert set(draws(Sampling(top_p=0.8))) == {1, 2, 3}
    kept = draws(Sampling(top_p=0.7))
    assert abs(kept[1] / 4000 - 0.5 / 0.75) < 0.03


def test_a_tiny_top_p_is_greedy():
    assert draws(Sampling(top_p=1e-9), 200) == {1: 200}


def test_a_tiny_temperature_is_greedy_and_does_not_overflow():
    assert draws(Sampling(temperature=1e-30), 20) == {1: 20}
    assert draws(Sampling(temperature=1e-4), 20) == {1: 20}


def test_top_k_keeps_the_k_most_likely():
    assert set(draws(Sampling(top_k=2))) == {1, 3}


def test_the_draw_depends_on_seed_and_position_only():
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
    how = [Sampling(seed=7), Sampling(seed=8, temperature=0.7), GREEDY]
    together = sample(logits, how, [3, 4, 5])
    alone = [sample(logits[i : i + 1], how[i : i + 1], [3 + i])[0] for i in range(3)]
    swapped = sample(logits.flip(0), how[::-1], [5, 4, 3])[::-1]
    assert together == alone == swapped


def test_seeds_and_positions_give_different_draws():
    numbers = [uniform(seed, position) for seed in range(50) for position in range(50)]
    assert len(set(numbers)) == 2500
    assert all(0 <= number < 1 for number in numbers)
    assert abs(sum(numbers) / 2500 - 0.5) < 0.02


def test_draws_stay_the_same_between_versions_and_machines():
    assert uniform(1, 2) == 0.7612170620886085


def test_tokens_of_no_probability_are_never_drawn():
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf"), 0.0]])
    found = {sample(logits, [Sampling(seed=seed)], [0])[0] for seed in range(300)}
    assert found == {1, 3}


def test_top_p_over_a_large_vocabulary_equals_a_plain_sort():
    logits = 4 * torch.randn(1, 5000, generator=torch.Generator().manual_seed(1))
    probs, order = logits[0].double().softmax(-1).sort(descending=True)
    for top_p in (0.1, 0.5, 0.9, 0.999):
        nucleus = set(order[: int((probs.cumsum(0) < top_p).sum()) + 1].tolist())
        how = Sampling(top_p=top_p)
        found = {sample(logits, [how], [position])[0] for position in range(400)}
        assert found <= nucleus
        assert len(found) > min(len(nucleus), 400) / 10
