"""Scores the tiny model on questions it has not seen, by exact match.

Prints accuracy by kind with the commonest mistakes, then by size of picture, then how the same
questions fare after JPEG, in other light and at a size never trained on. The last line is one
JSON object.

    python -m examples.tiny_vl.evaluate --seed 1 --num 1000
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import PIL
import torch
import transformers
from PIL import Image

from epd.checkpoints import resolve
from epd.checkpoints.pictures import KINDS, Question, draw_question
from epd.checkpoints.scenes import CELL_PX
from examples.tiny_vl import talk
from examples.tiny_vl.answer import Answerer
from examples.tiny_vl.disturb import as_jpeg, brightened

SHIPPED = "tiny-vl"
UNSEEN_SIZE = (196, 140)
"""Width and height in pixels; 7 x 5 image tokens, which the generator never draws by itself."""

_SIZE_BOUNDS_PX = (84, 140, 224, 448)


@dataclass(frozen=True, slots=True)
class Score:
    """One answered question; `kind` is that of the question or "chat"."""

    kind: str
    longest_px: int
    expected: str
    given: str

    @property
    def is_right(self) -> bool:
        return self.given == self.expected


def held_out(seed: int, num: int, size: tuple[int, int] | None = None) -> list[Question]:
    """`num` questions, the kinds in turn. No training seed draws from the same stream."""
    return [
        draw_question(Random(f"evaluate {seed} {i}"), KINDS[i % len(KINDS)], size)
        for i in range(num)
    ]


def score(answerer: Answerer, questions: Sequence[Question]) -> list[Score]:
    return [
        Score(
            question.kind,
            max(max(image.size) for image in question.images),
            question.answer,
            answerer.answer(question.images, question.prompt),
        )
        for question in questions
    ]


def score_chat(answerer: Answerer, seed: int, num: int) -> list[Score]:
    """Greetings and questions to refuse, without a picture."""
    rng = Random(f"evaluate chat {seed}")
    chats = [talk.draw_chat(rng) for _ in range(num)]
    return [Score("chat", 0, chat.answer, answerer.answer((), chat.prompt)) for chat in chats]


def accuracy(scores: Sequence[Score]) -> float:
    return round(sum(s.is_right for s in scores) / len(scores), 4) if scores else float("nan")


def by_kind(scores: Sequence[Score]) -> dict[str, float]:
    kinds = dict.fromkeys(s.kind for s in scores)
    return {kind: accuracy([s for s in scores if s.kind == kind]) for kind in kinds}


def print_table(scores: Sequence[Score]) -> None:
    """Accuracy by kind, and each kind's commonest mistakes word by word."""
    print(f"{'kind':<10} {'num':>5} {'right':>7}  commonest mistakes (expected > given: times)")
    for kind, share in by_kind(scores).items():
        part = [s for s in scores if s.kind == kind]
        mistakes = Counter(_difference(s) for s in part if not s.is_right).most_common(4)
        shown = "; ".join(f"{what}: {times}" for what, times in mistakes)
        print(f"{kind:<10} {len(part):>5} {share:>7.1%}  {shown}")
    print(f"\n{'longest side':<14} {'num':>5} {'right':>7}")
    low = 0
    for high in _SIZE_BOUNDS_PX:
        part = [s for s in scores if low < s.longest_px <= high]
        if part:
            print(f"{f'{low + 1}-{high} px':<14} {len(part):>5} {accuracy(part):>7.1%}")
        low = high


def _difference(s: Score) -> str:
    """The words that differ, or both sentences when they are not built alike."""
    expected, given = s.expected.split(), s.given.split()
    if len(expected) != len(given):
        return f"{s.expected} > {s.given}"
    pairs = [(a, b) for a, b in zip(expected, given, strict=True) if a != b]
    return f"{' '.join(a for a, _ in pairs)} > {' '.join(b for _, b in pairs)}"


def _changed(
    questions: Sequence[Question], change: Callable[[Image.Image], Image.Image]
) -> list[Question]:
    return [
        Question(tuple(change(image) for image in q.images), q.prompt, q.answer, q.kind)
        for q in questions
    ]


def robustness(answerer: Answerer, seed: int, num: int) -> dict[str, dict[str, float]]:
    """Accuracy by kind of the first `num` questions, changed in four ways."""
    questions = held_out(seed, num)
    sets = {
        "jpeg_quality_30": _changed(questions, lambda image: as_jpeg(image, 30)),
        "brightness_minus_10_percent": _changed(questions, lambda image: brightened(image, 0.9)),
        "brightness_plus_10_percent": _changed(questions, lambda image: brightened(image, 1.1)),
        f"unseen_size_{UNSEEN_SIZE[0]}x{UNSEEN_SIZE[1]}": held_out(seed, num, UNSEEN_SIZE),
    }
    results: dict[str, dict[str, float]] = {}
    for name, changed in sets.items():
        scores = score(answerer, changed)
        results[name] = {**by_kind(scores), "all": accuracy(scores)}
        shown = "  ".join(f"{kind} {share:.1%}" for kind, share in results[name].items())
        print(f"{name}: {shown}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the questions")
    parser.add_argument("--num", type=int, default=1000, help="questions about pictures")
    parser.add_argument("--model", default=SHIPPED, help="folder or name of a checkpoint")
    parser.add_argument("--robustness-num", type=int, help="questions per change; default: num / 4")
    args = parser.parse_args()
    start = time.monotonic()
    answerer = Answerer(resolve(args.model))
    scores = score(answerer, held_out(args.seed, args.num))
    scores += score_chat(answerer, args.seed, max(1, args.num // 10))
    print_table(scores)
    print(f"\nunseen size: {UNSEEN_SIZE[0] // CELL_PX} x {UNSEEN_SIZE[1] // CELL_PX} image tokens")
    changes = robustness(answerer, args.seed, args.robustness_num or max(8, args.num // 4))
    report = {
        "accuracy": by_kind(scores),
        "accuracy_of_pictures": accuracy([s for s in scores if s.kind != "chat"]),
        "robustness": changes,
        "seed": args.seed,
        "num": args.num,
        "time_s": round(time.monotonic() - start, 1),
        "machine": f"{os.cpu_count()}-core {platform.machine()} CPU",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "pillow": PIL.__version__,
        },
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
