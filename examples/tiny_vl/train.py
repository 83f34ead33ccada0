"""Trains the tiny model from nothing and writes its checkpoint.

First the vision tower alone learns what lies under each image token (`dense`); then tower and
language model learn to answer. Muon for the matrices, AdamW for the rest; the learning rate is
constant, then falls to zero over the last part of the time given.

Two processes of one thread each share every step: on two cores that others use as well, this
is up to twice as fast as two threads that meet after every operation.

    python -m examples.tiny_vl.train --out tiny-vl --seed 1 --minutes 55
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerBase,
    Qwen2_5_VLForConditionalGeneration,
)

from examples.tiny_vl.batches import MEAN, STD, Batch, BatchMaker, Pictures
from examples.tiny_vl.dense import DenseHead, accuracies
from examples.tiny_vl.model import build_config, build_model, language_forward, vision_forward
from examples.tiny_vl.muon import Muon
from examples.tiny_vl.pack import NO_TARGET
from examples.tiny_vl.save import save_checkpoint
from examples.tiny_vl.tokenizer import SPECIAL_TOKENS, build_tokenizer

logger = logging.getLogger(__name__)

STATE_FILE = "training-state.pt"


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how fast to train. How the shipped weights came about is in the model card."""

    minutes: float = 55.0
    num_vision_steps: int = 350
    num_processes: int = 2
    budget: int = 5000
    """About how many tokens a batch holds; sets the number of pictures in it."""
    muon_lr: float = 4e-3
    adam_lr: float = 3e-3
    warmup_steps: int = 100
    decay_ratio: float = 0.4
    weight_decay: float = 0.02
    dense_weight: float = 0.4


@dataclass(slots=True)
class Progress:
    """How far a training is.

    Kept in a file with all else, for the last time when the learning rate begins to fall, so that
    one can train on from there for longer.
    """

    step: int = 0
    elapsed_s: float = 0.0
    num_pictures: int = 0


class Trainer:
    """One model in training: its optimizers, and one step at a time."""

    def __init__(
        self, model: Qwen2_5_VLForConditionalGeneration, plan: Plan, image_token: int
    ) -> None:
        self.model = model
        self._plan = plan
        self._image_token = image_token
        self.head = DenseHead(model.config.vision_config.out_hidden_size)
        parameters = dict(model.named_parameters())
        embedding = "model.language_model.embed_tokens.weight"
        matrices = [p for name, p in parameters.items() if p.ndim == 2 and name != embedding]
        others = [p for name, p in parameters.items() if p.ndim != 2 or name == embedding]
        self._optimizers: list[torch.optim.Optimizer] = [
            Muon(matrices, lr=plan.muon_lr, weight_decay=plan.weight_decay),
            torch.optim.AdamW(
                [*others, *self.head.parameters()],
                lr=plan.adam_lr,
                betas=(0.9, 0.98),
                weight_decay=0.0,
            ),
        ]
        self._parameters = [*model.parameters(), *self.head.parameters()]
        self._dtype = fastest_dtype()
        mean, std = torch.tensor(MEAN), torch.tensor(STD)
        self._scale = (1 / (255 * std)).repeat_interleave(196)
        self._shift = (-mean / std).repeat_interleave(196)

    def step(self, batch: Batch, rate: float, elapsed_s: float) -> tuple[float, float, float]:
        """One update from the mean loss over the processes' batches.

        Args:
            batch: What this process has drawn.
            rate: Scales the learning rates.
            elapsed_s: Since the start, on this process's clock.

        Returns:
            Loss of the labels, loss of the answers, elapsed seconds; each the mean over processes.
        """
        dense, answer = self.losses(batch)
        (self._plan.dense_weight * dense + answer).backward()
        shared = self._share([dense.item(), answer.item(), elapsed_s])
        torch.nn.utils.clip_grad_norm_(self._parameters, 2.0)
        for optimizer, lr in zip(
            self._optimizers, (self._plan.muon_lr, self._plan.adam_lr), strict=True
        ):
            for group in optimizer.param_groups:
                group["lr"] = lr * rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return shared[0], shared[1], shared[2]

    def _share(self, figures: list[float]) -> list[float]:
        """Averages gradients, and `figures` with them, over the processes."""
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self._parameters]
        flat = torch.cat([*(grad.flatten() for grad in grads), torch.tensor(figures)])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        *parts, shared = flat.split([*(grad.numel() for grad in grads), len(figures)])
        for parameter, part in zip(self._parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        return shared.tolist()

    def keep(self, path: Path, at: Progress) -> None:
        state = {
            "model": self.model.state_dict(),
            "head": self.head.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "progress": asdict(at),
        }
        torch.save(state, path)

    def load(self, path: Path) -> Progress:
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.head.load_state_dict(state["head"])
        for optimizer, kept in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        return Progress(**state["progress"])

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss of the cells' labels and that of the answers' tokens."""
        features = [self.encode(pictures) for pictures in batch.pictures]
        zero = torch.zeros(())
        dense = zero
        for tokens, pictures in zip(features, batch.pictures, strict=True):
            labels = torch.from_numpy(pictures.labels).long()
            dense = dense + self.head.loss(tokens, labels) / len(features)
        if batch.rows is None:
            return dense, zero
        ids = torch.from_numpy(batch.rows.ids)
        embed = self.model.model.language_model.embed_tokens.weight
        x = F.embedding(ids, embed).to(self._dtype)
        if features:
            # The image tokens of a row come picture by picture, in the order of `features`.
            x = x.masked_scatter((ids == self._image_token)[..., None], torch.cat(features, dim=1))
        hidden = language_forward(
            self.model, x, torch.from_numpy(batch.rows.positions), self._mask(batch)
        )
        targets = torch.from_numpy(batch.rows.targets)
        asked = targets != NO_TARGET
        logits = F.linear(hidden[asked], embed.to(self._dtype)).float()
        return dense, F.cross_entropy(logits, targets[asked])

    def encode(self, pictures: Pictures) -> Tensor:
        pixels = torch.from_numpy(pictures.pixels).float() * self._scale + self._shift
        return vision_forward(self.model, pixels.to(self._dtype))

    def _mask(self, batch: Batch) -> Tensor:
        """[batch, 1, length, length]: each token sees its own branch and the prefix before it."""
        assert batch.rows is not None
        branches = torch.from_numpy(batch.rows.branches)
        own = branches[:, :, None] == branches[:, None, :]
        seen = (own | (branches[:, None, :] == 0)).tril()
        return torch.zeros(seen.shape).masked_fill_(~seen, -1e9)[:, None]


def fastest_dtype() -> torch.dtype:
    """bfloat16 where the CPU multiplies in it (AMX, AVX512-BF16); elsewhere that is emulated."""
    has_units = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if has_units else torch.float32


def rate_at(plan: Plan, step: int, elapsed_s: float) -> float:
    """Share of the full learning rate: warm-up by steps, constant, linear to zero by time."""
    left = (1 - elapsed_s / (60 * plan.minutes)) / plan.decay_ratio
    return max(0.0, min(1.0, (step + 1) / plan.warmup_steps, left))


def train(
    rank: int, out: Path, seed: int, plan: Plan, start_from: Path | None, resume: Path | None
) -> None:
    """One of the processes that train together; the first writes the checkpoint and the log."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    meeting = (out / "meeting").resolve().as_uri()
    dist.init_process_group("gloo", meeting, rank=rank, world_size=plan.num_processes)
    tokenizer, model = _begin(seed, start_from)
    trainer = Trainer(model, plan, model.config.image_token_id)
    maker = BatchMaker(tokenizer, seed, plan.budget)
    at = Progress()
    if resume is not None:
        at = trainer.load(resume)
    start = time.monotonic() - at.elapsed_s
    is_kept = False
    while at.elapsed_s < 60 * plan.minutes:
        is_vision_only = at.step < plan.num_vision_steps
        batch = maker.make(at.step * plan.num_processes + rank, is_vision_only)
        rate = rate_at(plan, at.step, at.elapsed_s)
        is_falling = rate < 1.0 and at.step > plan.warmup_steps
        if rank == 0 and not is_kept and (is_falling or at.step % 200 == 199):
            trainer.keep(out / STATE_FILE, at)
            is_kept = is_falling
        now_s = time.monotonic() - start
        dense, answer, at.elapsed_s = trainer.step(batch, rate, now_s)
        at.num_pictures += plan.num_processes * sum(len(p.pixels) for p in batch.pictures)
        if rank == 0 and at.step % 50 == 0:
            logger.info(
                "%s, rate %.3f, dense %.4f, answer %.4f, %s",
                *(at, rate, dense, answer, _seen(trainer, batch)),
            )
        if rank == 0 and at.step % 250 == 249:
            save_checkpoint(model, tokenizer, out)
        at.step += 1
    if rank == 0:
        save_checkpoint(model, tokenizer, out)
        logger.info("trained: %s; %.0f s of CPU in each process", at, time.process_time())
    dist.destroy_process_group()


def _begin(
    seed: int, start_from: Path | None
) -> tuple[PreTrainedTokenizerBase, Qwen2_5_VLForConditionalGeneration]:
    """Fresh weights, or those of a checkpoint, which then keeps its tokenizer."""
    if start_from is not None:
        model = Qwen2_5_VLForConditionalGeneration.from_pretrained(start_from, dtype=torch.float32)
        return AutoTokenizer.from_pretrained(start_from), model
    tokenizer = build_tokenizer()
    token_ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    return tokenizer, build_model(build_config(len(tokenizer), token_ids), seed)


@torch.no_grad()
def _seen(trainer: Trainer, batch: Batch) -> str:
    """What share of the labels the vision tower names right, on pictures just learnt from."""
    for pictures in batch.pictures:
        labels = torch.from_numpy(pictures.labels).long()
        shares = accuracies(trainer.head, trainer.encode(pictures), labels)
        return " ".join(f"{name} {share:.2f}" for name, share in shares.items())
    return ""


def main() -> None:
    defaults = Plan()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("build/tiny-vl"), help="folder for the checkpoint"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the data and the first weights")
    parser.add_argument("--minutes", type=float, default=defaults.minutes, help="how long to train")
    parser.add_argument("--vision-steps", type=int, default=defaults.num_vision_steps)
    parser.add_argument(
        "--decay-ratio",
        type=float,
        default=defaults.decay_ratio,
        help="share of the time in which the learning rate falls",
    )
    parser.add_argument("--start-from", type=Path, help="a checkpoint whose weights to train on")
    parser.add_argument("--resume", type=Path, help=f"a {STATE_FILE} to go on from")
    args = parser.parse_args()
    plan = Plan(
        minutes=args.minutes,
        num_vision_steps=args.vision_steps,
        decay_ratio=args.decay_ratio,
    )
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "meeting").unlink(missing_ok=True)
    # Ended by a signal, the processes must not train on without anyone to wait for them.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    torch.multiprocessing.spawn(
        train,
        (args.out, args.seed, plan, args.start_from, args.resume),
        nprocs=plan.num_processes,
        daemon=True,
    )
    (args.out / "meeting").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
