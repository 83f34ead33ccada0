"""The three stages' servers in simulated time, made of the sim engine's parts, without HTTP.

Queues, batches, caches, KV memory and links are those of `epd.engines.sim`, and so is the time each
takes. What a server adds is the order in which a request passes through them.
"""

from __future__ import annotations

import asyncio
from random import Random

from prometheus_client import CollectorRegistry

from encoders import ImageGrid
from epd.clock import Clock
from epd.engines.shell import WorkerMetrics
from epd.engines.sim.decode_loop import DecodeLoop, Running
from epd.engines.sim.encode_batches import EncodeBatches
from epd.engines.sim.kv_cache import KVCache, KVHold
from epd.engines.sim.link import Link
from epd.engines.sim.pace import Pace
from epd.engines.sim.profile import Profile
from epd.engines.torch.embedding_store import EmbeddingStore, Entry, Stored
from epd.simulator.requests import Image, SimRequest
from epd.types import Stage
from epd.wire import Load

_ADDRESS = 2**20
"""Where embeddings would be: regions are only counted."""
_NO_GRID = ImageGrid(1, 1, 1)
_NEVER_S = 1e9
"""Longer than any simulation: nothing is given up, so that every request counts."""


class Server:
    """What servers of all stages have.

    Attributes:
        metrics: those that workers publish; `busy_s` and others are read from them.
    """

    def __init__(self, stage: Stage, profile: Profile, clock: Clock, random: Random) -> None:
        self.stage = stage
        self.metrics = WorkerMetrics(CollectorRegistry())
        self.profile = profile
        self.pace = Pace(
            clock,
            time_scale=profile.time_scale,
            jitter_ratio=profile.jitter_ratio,
            random=random,
        )

    @property
    def busy_s(self) -> float:
        """Time spent computing."""
        return self._sample("epd_step_seconds_sum", step=self.stage.value)

    def _sample(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


class EncodeServer(Server):
    """Encodes images in batches, keeps their embeddings as long as they fit, and sends them."""

    def __init__(self, profile: Profile, clock: Clock, random: Random) -> None:
        super().__init__(Stage.ENCODE, profile, clock, random)
        self._token_bytes = profile.model.embedding_format.token_bytes
        self._batches = EncodeBatches(profile.encode, self.pace, self.metrics)
        self._link = Link(profile.transfer, self.pace)
        nbytes = profile.encode.cache_image_tokens * self._token_bytes
        self._store = EmbeddingStore(_ADDRESS, nbytes, clock)

    @property
    def num_encodes(self) -> int:
        """Images that went through the vision tower; not those that were cached or joined."""
        return int(self._sample("epd_encodes_total"))

    async def encode(self, image: Image) -> None:
        """Have the image's embeddings, and hold them until they are sent."""
        entry, _ = self._pin(image)
        try:
            await entry.stored()
            self._store.hold(image.content_hash)
        finally:
            self._store.unpin(entry)

    async def send(self, image: Image) -> None:
        """Hand an encoded image over; one that had to make room meanwhile is encoded again."""
        entry, _ = self._pin(image)
        try:
            await entry.stored()
            await self._link.send(image.num_tokens * self._token_bytes)
        finally:
            self._store.unpin(entry)
            self._store.let_go(image.content_hash)

    def load(self) -> Load:
        return Load(
            num_waiting_reqs=self._batches.num_waiting,
            num_waiting_tokens=self._batches.num_waiting_tokens,
            max_total_num_tokens=self.profile.encode.cache_image_tokens,
        )

    @property
    def is_idle(self) -> bool:
        """Whether nothing of any request is left here, but in the cache."""
        return not self._batches.num_waiting and not self._store.needed_bytes

    async def close(self) -> None:
        await self._store.close()
        await self._batches.close()

    def _pin(self, image: Image) -> tuple[Entry, bool]:
        return self._store.pin(image.content_hash, lambda: self._produce(image))

    async def _produce(self, image: Image) -> Stored:
        nbytes = image.num_tokens * self._token_bytes
        region = await self._store.reserve(nbytes, image.content_hash, _NEVER_S)
        await self._batches.encode(image.num_tokens)
        return Stored(region, _NO_GRID, image.num_tokens)


class PrefillServer(Server):
    """Computes prompts one after another, less their cached prefix; holds KV until it is taken."""

    def __init__(self, profile: Profile, clock: Clock, random: Random) -> None:
        super().__init__(Stage.PREFILL, profile, clock, random)
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        """Of the prompt tokens, those that were not computed."""
        model = profile.model
        self._kv = KVCache(profile.prefill.kv_capacity_tokens, model.block_tokens, clock)
        self._link = Link(profile.transfer, self.pace)
        self._turn = asyncio.Lock()

    async def prefill(self, request: SimRequest) -> KVHold:
        """Compute the prompt; the caller releases the KV once decode has it.

        A prefix counts as cached if it is there when the prompt's turn comes, as in SGLang, whose
        scheduler matches prefixes when it makes up a batch.
        """
        prompt = request.prompt
        async with self._turn:
            hold = await self._kv.hold(prompt.num_tokens, prompt.block_hashes, _NEVER_S)
            num_cached = min(hold.num_hit * self._kv.block_tokens, prompt.num_tokens - 1)
            work_ms = self.profile.prefill.prompt_ms(prompt.num_tokens, num_cached)
            seconds = self.pace.seconds(work_ms)
            await self.pace.wait(seconds)
        self.metrics.step_seconds.labels("prefill").observe(seconds)
        self.num_prompt_tokens += prompt.num_tokens
        self.num_cached_tokens += num_cached
        self._kv.publish(hold, prompt.block_hashes)
        return hold

    async def send(self, request: SimRequest) -> None:
        """Hand the prompt's KV over."""
        model = self.profile.model
        await self._link.send(model.num_blocks(request.prompt.num_tokens) * model.block_bytes)

    def release(self, hold: KVHold) -> None:
        self._kv.release(hold)

    def load(self) -> Load:
        return Load(
            num_used_tokens=self._kv.num_held_tokens, max_total_num_tokens=self._kv.max_tokens
        )

    @property
    def is_idle(self) -> bool:
        """Whether nothing of any request is left here, but in the cache."""
        return not self._kv.num_held_blocks and not self._turn.locked()

    async def close(self) -> None:
        return


class DecodeServer(Server):
    """Takes KV over once there is room for prompt and longest answer, and batches continuously."""

    def __init__(self, profile: Profile, clock: Clock, random: Random) -> None:
        super().__init__(Stage.DECODE, profile, clock, random)
        self._kv = KVCache(profile.decode.kv_capacity_tokens, profile.model.block_tokens, clock)
        self._loop = DecodeLoop(profile.decode, self.pace, clock, self.metrics)

    async def reserve(self, request: SimRequest) -> KVHold:
        """Wait for KV memory; the caller releases it when the answer is done."""
        num_tokens = request.prompt.num_tokens + request.max_new_tokens
        return await self._kv.hold(num_tokens, (), _NEVER_S)

    async def generate(self, request: SimRequest) -> None:
        """Compute the answer after its first token."""
        running = Running(request.num_output_tokens, request.prompt.num_tokens, slow_factor=1.0)
        self._loop.join(running)
        await running.wait(running.num_tokens, _NEVER_S)

    def release(self, hold: KVHold) -> None:
        self._kv.release(hold)

    def load(self) -> Load:
        return Load(
            num_running_reqs=self._loop.num_running,
            num_waiting_tokens=self._kv.num_waiting_tokens,
            num_used_tokens=self._kv.num_held_tokens,
            max_total_num_tokens=self._kv.max_tokens,
        )

    @property
    def is_idle(self) -> bool:
        """Whether nothing of any request is left here."""
        return not self._kv.num_held_blocks and not self._loop.num_running

    async def close(self) -> None:
        await self._loop.close()
