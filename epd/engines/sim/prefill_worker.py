"""The simulated prefill stage: a chat request in, a room with its KV out to a decode worker.

/v1/chat/completions                have images encoded, wait as long as the prompt takes
GET  /bootstrap/rooms/{room}        decode asks what it needs to take over (long poll)
POST /bootstrap/rooms/{room}/send   decode has room: wait as long as the KV takes

Prompts are computed one after another. A request holds its KV until decode has taken it, so a full
cache makes the next one wait.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web
from prometheus_client import Counter

from epd.engines.contract.context_limits import ContextLimits
from epd.engines.contract.encode_calls import EncodeCalls, EncodedImage, all_of
from epd.engines.contract.rooms import OpenRoom, RoomTable
from epd.engines.shell import Shell
from epd.engines.sim.answer import token_id_after
from epd.engines.sim.faults import Faults
from epd.engines.sim.kv_cache import KVCache, KVHold
from epd.engines.sim.link import Link
from epd.engines.sim.pace import Pace
from epd.engines.sim.profile import Profile
from epd.engines.sim.prompt import SimPrompt, build_prompt, prompt_seed
from epd.errors import AbortedError, BadRequestError, EPDError, TransferError, WorkerError
from epd.types import Room
from epd.wire import (
    ChatRequest,
    Load,
    RoomDescriptor,
    RoomSendRequest,
    SendResponse,
    load_json,
    parse,
    parse_chat_request,
)


class SimPrefillWorker:
    """See `epd.engines.shell.StageWorker`."""

    def __init__(
        self,
        shell: Shell,
        profile: Profile,
        pace: Pace,
        faults: Faults,
        *,
        limits: ContextLimits,
        timeout_s: float,
    ) -> None:
        self._shell = shell
        self._faults = faults
        self._profile = profile
        self._model = profile.model
        self._limits = limits
        self._timeout_s = timeout_s
        self._pace = pace
        self._rooms = RoomTable(shell.clock)
        self._turn = asyncio.Lock()  # prompts are computed one after another
        self._link = Link(profile.transfer, pace)
        self._kv = KVCache(
            profile.prefill.kv_capacity_tokens, profile.model.block_tokens, shell.clock
        )
        self._encoders = EncodeCalls(
            shell,
            profile.model.embedding_format,
            session_id=shell.identity.worker_id,
            timeout_s=timeout_s,
        )
        self._num_waiting_tokens = 0
        self._publish_metrics()

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/chat/completions", self.chat),
            web.get(r"/bootstrap/rooms/{room:\d+}", self.describe_room),
            web.post(r"/bootstrap/rooms/{room:\d+}/send", self.send_room),
        ]

    async def chat(self, request: web.Request) -> web.Response:
        """Prefill a request and answer when decode has its KV."""
        chat = parse_chat_request(load_json(await request.read()))
        rid, room = chat.rid, chat.bootstrap_room
        if rid is None or room is None:
            raise BadRequestError("a prefill worker needs rid and bootstrap_room", param="rid")
        async with self._shell.requests.scope(rid):
            with self._shell.metrics.outcome():
                entry = self._rooms.open(Room(room), rid)
                try:
                    num_prompt_tokens = await self._carry_out(
                        chat, entry, self._faults.slow_factor(request)
                    )
                except EPDError as error:
                    entry.fail(error)
                    raise
                except asyncio.CancelledError:
                    entry.fail(AbortedError("the request was aborted", request_id=rid))
                    raise
                finally:
                    self._rooms.close(entry)
        usage = {"prompt_tokens": num_prompt_tokens, "total_tokens": num_prompt_tokens}
        return web.json_response({"id": rid, "object": "chat.completion", "usage": usage})

    async def describe_room(self, request: web.Request) -> web.Response:
        """What decode needs to take over; waits until prefill is done or has failed."""
        room = Room(int(request.match_info["room"]))
        entry = await self._rooms.wait_prefilled(room, self._timeout_s)
        assert entry.descriptor is not None, "a room that is ready has a descriptor"
        return web.json_response(entry.descriptor.model_dump())

    async def send_room(self, request: web.Request) -> web.Response:
        """Hand the room's KV to the decode worker; the room is over, well or not."""
        message = parse(RoomSendRequest, await request.read())
        room = Room(int(request.match_info["room"]))
        entry = self._rooms.begin_send(room, message.generation)
        try:
            response = await self._send(entry, message, self._faults.slow_factor(request))
        except EPDError as error:
            entry.fail(error)
            raise
        except BaseException:
            entry.fail(WorkerError("the decode worker left during the hand-off"))
            raise
        entry.finish()
        return web.json_response(response.model_dump())

    def load(self) -> Load:
        num_open = self._rooms.num_open
        return Load(
            num_running_reqs=num_open,
            num_waiting_reqs=max(0, len(self._shell.requests) - num_open),
            num_waiting_tokens=self._num_waiting_tokens,
            num_used_tokens=self._kv.num_held_tokens,
            max_total_num_tokens=self._kv.max_tokens,
            num_completed_reqs=self._shell.requests.num_completed,
        )

    def abort(self, rid: str) -> None:
        """Nothing to do: what a request holds is its handler's, which the shell cancels."""

    async def wait_idle(self) -> None:
        return

    def describe(self) -> dict[str, Any]:
        return {
            "model_fingerprint": self._model.fingerprint,
            "kv_layout": self._model.kv_layout.model_dump(),
            "max_total_num_tokens": self._kv.max_tokens,
        }

    async def close(self) -> None:
        return

    async def _carry_out(self, chat: ChatRequest, entry: OpenRoom, slow_factor: float) -> int:
        """From messages to a room that decode has emptied; the number of prompt tokens."""
        # Inside the room, so that decode is told of a refusal instead of waiting for the room.
        self._shell.lifecycle.check_accepts_work()
        seed = prompt_seed(chat, self._profile.seed)
        first_token_id = token_id_after(seed, chat.generated_token_ids)
        self._limits.check(self._lay_out(chat, [0] * len(chat.images)).num_tokens, chat)
        images = await self._encoders.encode(entry.rid, chat)
        prompt = self._lay_out(chat, [image.num_tokens for image in images])
        self._limits.check(prompt.num_tokens, chat)
        hold = await self._prefill(prompt, images, entry.rid, slow_factor)
        try:
            entry.publish(self._descriptor(prompt, entry, seed, first_token_id), ())
            await entry.wait_taken(self._timeout_s)
        finally:
            self._kv.release(hold)
        return prompt.num_tokens

    async def _prefill(
        self, prompt: SimPrompt, images: list[EncodedImage], rid: str, slow_factor: float
    ) -> KVHold:
        """Land the embeddings and compute the prompt; the caller owns the KV."""
        self._num_waiting_tokens += prompt.num_kv_tokens
        try:
            await all_of(self._encoders.send(image, address=0) for image in images)
            hold = await self._kv.hold(prompt.num_kv_tokens, prompt.block_hashes, self._timeout_s)
            try:
                await self._compute(prompt, hold, rid, slow_factor)
            except BaseException:
                self._kv.release(hold)
                raise
        finally:
            self._num_waiting_tokens -= prompt.num_kv_tokens
        return hold

    async def _compute(self, prompt: SimPrompt, hold: KVHold, rid: str, slow_factor: float) -> None:
        # The last token gives the first of the answer, so it is computed even if it is cached.
        num_cached = min(hold.num_hit * self._kv.block_tokens, prompt.num_kv_tokens - 1)
        work_ms = self._profile.prefill.prompt_ms(prompt.num_kv_tokens, num_cached)
        async with self._turn:
            began_s = self._shell.clock.monotonic()
            await self._pace.wait(self._pace.seconds(work_ms * slow_factor))
        seconds = self._shell.clock.monotonic() - began_s
        self._shell.metrics.step_seconds.labels("prefill").observe(seconds)
        self._prompt_tokens.inc(prompt.num_kv_tokens)
        self._cached_tokens.inc(num_cached)
        self._kv.publish(hold, prompt.block_hashes)
        self._shell.span(rid, "prefill", began_s, num_tokens=prompt.num_kv_tokens)

    async def _send(
        self, entry: OpenRoom, message: RoomSendRequest, slow_factor: float
    ) -> SendResponse:
        began_s = self._shell.clock.monotonic()
        assert entry.descriptor is not None, "a room that is sent has a descriptor"
        num_blocks = entry.descriptor.num_blocks
        if len(message.block_addresses) != num_blocks:
            raise TransferError(
                f"{len(message.block_addresses)} addresses for {num_blocks} blocks of KV"
            )
        nbytes = num_blocks * self._model.block_bytes
        await entry.unless_ended(self._link.send(nbytes, slow_factor))
        self._shell.metrics.kv_bytes.labels("sent").inc(nbytes)
        self._shell.span(entry.rid, "kv_handoff", began_s, nbytes=nbytes)
        return SendResponse(nbytes=nbytes, duration_s=self._shell.clock.monotonic() - began_s)

    def _lay_out(self, chat: ChatRequest, image_tokens: list[int]) -> SimPrompt:
        return build_prompt(
            chat,
            image_tokens,
            chars_per_token=self._model.chars_per_token,
            block_tokens=self._model.block_tokens,
        )

    def _descriptor(
        self, prompt: SimPrompt, entry: OpenRoom, seed: int, first_token_id: int
    ) -> RoomDescriptor:
        return RoomDescriptor(
            room=entry.room,
            generation=entry.generation,
            num_prompt_tokens=prompt.num_tokens,
            num_generated_tokens=prompt.num_generated,
            next_position=prompt.num_kv_tokens,
            first_token_id=first_token_id,
            seed=seed,
            num_blocks=self._model.num_blocks(prompt.num_kv_tokens),
            layout=self._model.kv_layout,
        )

    def _publish_metrics(self) -> None:
        metrics = self._shell.metrics
        self._prompt_tokens = Counter(
            "epd_prompt_tokens", "Prompt tokens of prefills", registry=metrics.registry
        )
        self._cached_tokens = Counter(
            "epd_cached_prompt_tokens",
            "Prompt tokens whose KV was cached",
            registry=metrics.registry,
        )
        metrics.gauge(
            "epd_rooms_open",
            "Rooms with a prefill at work or KV to take",
            lambda: self._rooms.num_open,
        )
        metrics.gauge(
            "epd_kv_blocks_used", "KV blocks that requests hold", lambda: self._kv.num_held_blocks
        )
