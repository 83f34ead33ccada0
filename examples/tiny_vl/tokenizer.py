"""Builds the tokenizer of the tiny model: byte-level BPE with the special tokens of Qwen2.5-VL.

Trained on the words of our own questions and answers. Any other text is still encoded, byte by
byte where need be.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers import pre_tokenizers as pre
from transformers import PreTrainedTokenizerBase, Qwen2TokenizerFast

from epd.checkpoints.pictures import KINDS, ask_about, draw_scenes
from examples.tiny_vl import talk

VOCAB_SIZE = 768
"""All tokens, special ones included; also the vocabulary of the model."""

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
# How Qwen2's tokenizer cuts text before BPE (transformers, tokenization_qwen2.py): every digit
# alone, words with their leading space.
_CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The chat template of Qwen2.5-VL-Instruct, without the option to number the pictures.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif content['type'] == 'video' or 'video' in content %}"
    "<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tokenizer(seed: int = 0, num_lines: int = 6000) -> PreTrainedTokenizerBase:
    """Trains the tokenizer; equal seeds give equal vocabularies."""
    rng = Random(f"tokenizer {seed}")
    lines = talk.corpus(rng, num_lines)
    for _ in range(num_lines):
        for ask in ask_about(rng, draw_scenes(rng, rng.choice(KINDS), size=(112, 112))):
            lines += [ask.prompt, ask.answer]
    lines += [talk.DEFAULT_SYSTEM, "system\n", "user\n", "assistant\n"] * num_lines
    core = Tokenizer(models.BPE())
    core.normalizer = normalizers.NFC()
    core.pre_tokenizer = pre.Sequence(
        [
            pre.Split(Regex(_CUT), behavior="isolated"),
            pre.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(
        lines,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
            initial_alphabet=pre.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    core.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    tokenizer = Qwen2TokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token=None,
        bos_token=None,
        extra_special_tokens=[t for t in SPECIAL_TOKENS if t not in ("<|im_end|>",)],
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the files to")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tokenizer = build_tokenizer(args.seed)
    tokenizer.save_pretrained(args.out)
    print(f"{len(tokenizer)} tokens written to {args.out}")


if __name__ == "__main__":
    main()
