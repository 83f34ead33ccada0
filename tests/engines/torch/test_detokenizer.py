import random
from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer

from epd.engines.torch.detokenizer import Detokenizer, TextDelta
from epd.engines.torch.tiny import write_random_checkpoint

TEXT = "naïve café: 漢字 and 🙂👩‍👩‍👧 done"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer")
    write_random_checkpoint(path)
    return Tokenizer.from_file(str(path / "tokenizer.json"))


def feed(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    *,
    stop: Sequence[str] = (),
    eos: Sequence[int] = (),
    max_new_tokens: int = 10_000,
) -> list[TextDelta]:
    detokenizer = Detokenizer(
        tokenizer, eos_token_ids=eos, max_new_tokens=max_new_tokens, stop_strings=stop
    )
    deltas: list[TextDelta] = []
    for token_id in token_ids:
        deltas.append(detokenizer.push(token_id))
        if deltas[-1].finish_reason:
            break
    return deltas


def text_of(deltas: list[TextDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def test_characters_of_many_tokens_come_whole(tokenizer: Tokenizer):
    ids = tokenizer.encode(TEXT).ids
    assert len(ids) > len(TEXT), "the tiny tokenizer splits these characters into bytes"
    deltas = feed(tokenizer, ids)
    assert text_of(deltas) == TEXT
    assert not any("�" in delta.text for delta in deltas)
    assert sum(bool(delta.text) for delta in deltas) > 10


def test_random_tokens_join_to_what_decoding_at_once_gives(tokenizer: Tokenizer):
    chance = random.Random(0)
    for _ in range(200):
        ids = [chance.randrange(tokenizer.get_vocab_size()) for _ in range(30)]
        deltas = feed(tokenizer, ids, max_new_tokens=30)
        assert text_of(deltas) == tokenizer.decode(ids, skip_special_tokens=True)


def test_a_character_cut_by_the_limit_is_not_lost(tokenizer: Tokenizer):
    ids = tokenizer.encode("🙂").ids
    assert len(ids) > 1
    deltas = feed(tokenizer, ids, max_new_tokens=len(ids) - 1)
    assert deltas[-1] == TextDelta(tokenizer.decode(ids[:-1]), "length")


def test_the_limit_ends_with_length(tokenizer: Tokenizer):
    ids = tokenizer.encode("one two three").ids
    deltas = feed(tokenizer, ids, max_new_tokens=3)
    assert len(deltas) == 3
    assert [delta.finish_reason for delta in deltas] == [None, None, "length"]
    assert text_of(deltas) == tokenizer.decode(ids[:3])


def test_an_end_token_ends_with_stop_and_shows_nothing(tokenizer: Tokenizer):
    end = tokenizer.token_to_id("<|im_end|>")
    ids = tokenizer.encode("yes").ids
    deltas = feed(tokenizer, [*ids, end, *ids], eos=[end], max_new_tokens=len(ids) + 1)
    assert text_of(deltas) == "yes"
    assert deltas[-1].finish_reason == "stop"


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (["three"], "one two "),
        (["o t"], "one tw"),
        (["four", " two"], "one"),
        (["two three", "e t"], "on"),
        (["one"], ""),
        (["ee four"], "one two thr"),
        (["absent"], "one two three four"),
        (["four!"], "one two three four"),
    ],
)
def test_the_answer_ends_before_the_first_stop_string(
    tokenizer: Tokenizer, stop: list[str], expected: str
):
    text = "one two three four"
    for ids in (tokenizer.encode(text).ids, [tokenizer.token_to_id(c) for c in _alphabet(text)]):
        deltas = feed(tokenizer, ids, stop=stop, max_new_tokens=len(ids))
        assert text_of(deltas) == expected
        shown = ""
        for delta in deltas:
            shown += delta.text
            assert expected.startswith(shown), "text was sent that belongs to a stop string"
        assert deltas[-1].finish_reason == ("length" if expected == text else "stop")


def test_a_stop_string_of_many_bytes_is_found_over_tokens(tokenizer: Tokenizer):
    deltas = feed(tokenizer, tokenizer.encode("go 漢字 on").ids, stop=["漢字"])
    assert text_of(deltas) == "go "
    assert deltas[-1].finish_reason == "stop"


def test_text_that_only_looked_like_a_stop_string_is_sent_at_once(tokenizer: Tokenizer):
    ids = [tokenizer.token_to_id(c) for c in "aab"]
    assert [delta.text for delta in feed(tokenizer, ids, stop=["aaa"])] == ["", "", "aab"]


def test_text_held_for_a_stop_string_is_sent_at_the_end(tokenizer: Tokenizer):
    end = tokenizer.token_to_id("<|im_end|>")
    ids = [*(tokenizer.token_to_id(c) for c in "ab"), end]
    assert [delta.text for delta in feed(tokenizer, ids, stop=["abc"], eos=[end])] == ["", "", "ab"]


def _alphabet(text: str) -> str:
    """ASCII text as byte-level tokens spell it."""
    return text.replace(" ", "Ġ")
