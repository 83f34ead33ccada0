"""Which prefill and which decode worker get a request.

Owns what is believed of the workers' KV caches. Image parts are placed later, each when the prefill
worker asks for it (`encode_placement`); where their embeddings may come from counts here already.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from epd.config import RoutingConfig
from epd.coordinator.admission import StageWork
from epd.coordinator.dispatch import Pair
from epd.coordinator.encode_placement import EncodePlacement
from epd.coordinator.lifecycle import Placement
from epd.errors import NoWorkerError
from epd.pools.registry import Registry, Worker
from epd.pools.router import build_router
from epd.pools.routing import Block, HandOff, PrefixIndex, Work
from epd.types import Stage


@dataclass(frozen=True, slots=True)
class PlacedPair:
    """The workers of one request, and what it weighs on them."""

    pair: Pair
    placements: tuple[Placement, Placement]
    prefill_tokens: int
    """Prompt tokens that prefill is believed to have to compute."""
    kv_tokens: int
    """KV that decode will hold, as far as is reserved for the answer."""


class PairPlacement:
    """Places prefill and decode.

    Args:
        registry: the workers; tells when one ends.
        encode: knows which encode workers may send a request's embeddings.
        config: the policies and what they weigh.
        random: draws lots.
    """

    def __init__(
        self, registry: Registry, encode: EncodePlacement, config: RoutingConfig, random: Random
    ) -> None:
        self.index = PrefixIndex(max_blocks=config.max_prefix_blocks)
        self._registry = registry
        self._encode = encode
        self._reserved_tokens = config.decode_reserved_tokens
        self._prefill = build_router(Stage.PREFILL, config, random)
        self._decode = build_router(Stage.DECODE, config, random)
        registry.on_end(lambda worker: self.index.forget(worker.worker_id))

    def place(
        self,
        model_id: str,
        blocks: Sequence[Block],
        image_tokens: Mapping[str, int],
        max_new_tokens: int | None,
        avoid: Collection[Worker] = (),
    ) -> PlacedPair:
        """Choose the pair for a request.

        Args:
            model_id: the model it asks for.
            blocks: its prompt.
            image_tokens: of its images, by content hash.
            max_new_tokens: limit on its answer, if it has one.
            avoid: workers that failed at it.

        Raises:
            NoWorkerError: there is no worker of a stage, or none other; the message names it.
        """
        num_tokens = sum(block.num_tokens for block in blocks)
        decoders = self._others(Stage.DECODE, model_id, avoid)
        kv = HandOff(num_tokens, frozenset(worker.place for worker in decoders))
        prefill, first = self._prefill.choose(
            self._others(Stage.PREFILL, model_id, avoid),
            Work(num_tokens),
            hits=self.index.find(blocks),
            hand_offs=[*self._encode.hand_offs(model_id, image_tokens), kv],
        )
        growth = self._growth(max_new_tokens)
        decode, second = self._decode.choose(
            decoders,
            Work(num_tokens, growth),
            hits={},
            hand_offs=[HandOff(num_tokens, frozenset({prefill.place}))],
        )
        return PlacedPair(
            Pair(prefill, decode),
            (
                Placement(Stage.PREFILL, prefill.worker_id, first.reason),
                Placement(Stage.DECODE, decode.worker_id, second.reason),
            ),
            prefill_tokens=num_tokens - first.candidate.hit_tokens,
            kv_tokens=num_tokens + growth,
        )

    def work(
        self,
        model_id: str,
        blocks: Sequence[Block],
        image_tokens: Mapping[str, int],
        max_new_tokens: int | None,
    ) -> StageWork:
        """What a request will ask of the stages, where caches serve it best; see `place`."""
        num_tokens = sum(block.num_tokens for block in blocks)
        return StageWork(
            self._encode.uncached_tokens(model_id, image_tokens),
            num_tokens - max(self.index.find(blocks).values(), default=0),
            num_tokens + self._growth(max_new_tokens),
        )

    def _growth(self, max_new_tokens: int | None) -> int:
        reserved = self._reserved_tokens
        return reserved if max_new_tokens is None else min(reserved, max_new_tokens)

    def _others(self, stage: Stage, model_id: str, avoid: Collection[Worker]) -> list[Worker]:
        ready = self._registry.ready(stage, model_id)
        others = [worker for worker in ready if worker not in avoid]
        if not others:
            raise NoWorkerError(f"every {stage} worker that is ready failed at this request")
        return others

    def remember(self, prefill: Worker, blocks: Sequence[Block]) -> None:
        """The worker will have a prompt's blocks in its cache."""
        capacity = prefill.report.load.max_total_num_tokens
        self.index.add(prefill.worker_id, blocks, max_tokens=capacity)
