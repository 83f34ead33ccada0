"""The simulated decode stage: takes a room over and answers in OpenAI's shape.

/v1/chat/completions  ask the room → wait for KV memory → have the KV sent → join the running
                      batch → stream or collect numbered words

An answer that another worker began goes on after the tokens that are there.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from typing import Any

from aiohttp import web

from epd.engines.contract.answer_stream import AnswerStream
from epd.engines.contract.answers import Answer, AnswerEvents, ended_before
from epd.engines.contract.context_limits import ContextLimits
from epd.engines.contract.room_calls import RoomCalls
from epd.engines.shell import Shell
from epd.engines.sim.answer import SimAnswer, build_answer, token_id_after
from epd.engines.sim.decode_loop import DecodeLoop, Running
from epd.engines.sim.faults import Faults
from epd.engines.sim.kv_cache import KVCache
from epd.engines.sim.pace import Pace
from epd.engines.sim.profile import Profile
from epd.engines.sim.prompt import prompt_seed
from epd.errors import BadRequestError, EPDError, TransferError, WorkerError
from epd.wire import (
    ChatRequest,
    Load,
    RoomDescriptor,
    RoomSendRequest,
    load_json,
    parse_chat_request,
)


class SimDecodeWorker:
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
        self._profile = profile
        self._model = profile.model
        self._faults = faults
        self._limits = limits
        self._timeout_s = timeout_s
        self._rooms = RoomCalls(shell.peers, timeout_s)
        self._kv = KVCache(
            profile.decode.kv_capacity_tokens, profile.model.block_tokens, shell.clock
        )
        self._loop = DecodeLoop(profile.decode, pace, shell.clock, shell.metrics)
        shell.metrics.gauge(
            "epd_kv_blocks_used", "KV blocks that requests hold", lambda: self._kv.num_held_blocks
        )

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/v1/chat/completions", self.chat)]

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Answer a request whose prompt a prefill worker computes."""
        chat = parse_chat_request(load_json(await request.read()))
        if chat.rid is None:
            raise BadRequestError("a decode worker needs rid", param="rid")
        stream = AnswerStream(request, self._timeout_s) if chat.stream else None
        try:
            # The scope is inside: an abort becomes an error here, where the stream can tell it.
            async with self._shell.requests.scope(chat.rid):
                with self._shell.metrics.outcome():
                    return await self._answer(chat, chat.rid, request, stream)
        except EPDError as error:
            if stream is None or not stream.has_begun:
                raise
            return await stream.fail(error)

    def load(self) -> Load:
        num_running = self._loop.num_running
        return Load(
            num_running_reqs=num_running,
            num_waiting_reqs=max(0, len(self._shell.requests) - num_running),
            num_waiting_tokens=self._kv.num_waiting_tokens,
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
        await self._loop.close()

    async def _answer(
        self, chat: ChatRequest, rid: str, request: web.Request, stream: AnswerStream | None
    ) -> web.StreamResponse:
        self._shell.lifecycle.check_accepts_work()
        descriptor = await self._rooms.describe(chat)
        self._check(chat, descriptor)
        self._limits.check(descriptor.num_prompt_tokens, chat)
        max_new_tokens = self._limits.max_new_tokens(descriptor.num_prompt_tokens, chat)
        planned = self._plan(chat, descriptor, max_new_tokens)
        num_generated = len(chat.generated_token_ids)
        head = Answer.to(chat, rid, descriptor, self._shell)
        async with self._with_kv(chat, descriptor, max_new_tokens):
            began_s = self._shell.clock.monotonic()
            running = Running(
                planned.num_tokens,
                descriptor.num_kv_tokens,
                self._faults.slow_factor(request),
                num_done=num_generated + 1,  # prefill has computed one
            )
            async with aclosing(
                self._progress(running, request, num_generated, is_stream=stream is not None)
            ) as progress:
                if stream is None:
                    async for _ in progress:
                        pass
                    response = web.json_response(
                        head.whole(planned.text, planned.finish_reason, planned.num_tokens)
                    )
                else:
                    response = await self._stream(chat, head, planned, progress, stream)
            self._shell.span(rid, "decode", began_s, num_tokens=planned.num_tokens - num_generated)
        return response

    def _plan(
        self, chat: ChatRequest, descriptor: RoomDescriptor, max_new_tokens: int
    ) -> SimAnswer:
        """The whole answer, in which the tokens that are there must have their place."""
        planned = build_answer(
            descriptor.seed,
            self._profile.answer,
            max_new_tokens=max_new_tokens,
            stop_strings=chat.stop_strings,
            ignores_eos=bool((chat.model_extra or {}).get("ignore_eos")),
        )
        if len(chat.generated_token_ids) > planned.num_tokens:
            raise ended_before(planned.num_tokens)
        return planned

    @asynccontextmanager
    async def _with_kv(
        self, chat: ChatRequest, descriptor: RoomDescriptor, max_new_tokens: int
    ) -> AsyncGenerator[None]:
        """Take the room's KV over once there is memory for it and the longest answer."""
        num_tokens = descriptor.num_prompt_tokens + max_new_tokens
        hold = await self._kv.hold(num_tokens, (), self._timeout_s)
        try:
            answer = await self._rooms.send(
                chat,
                RoomSendRequest(
                    generation=descriptor.generation,
                    session_id=self._shell.identity.worker_id,
                    # Nothing is written, so any addresses will do.
                    block_addresses=list(range(descriptor.num_blocks)),
                ),
            )
            expected = descriptor.num_blocks * self._model.block_bytes
            if answer.nbytes != expected:
                raise TransferError(f"{answer.nbytes} of {expected} KV bytes were written")
            self._shell.metrics.kv_bytes.labels("received").inc(expected)
            yield
        finally:
            self._kv.release(hold)

    async def _progress(
        self, running: Running, request: web.Request, num_seen: int, *, is_stream: bool
    ) -> AsyncGenerator[int]:
        """The number of tokens that are there, whenever it has grown; all in the end."""
        self._loop.join(running)
        try:
            await self._faults.strike_after(request, num_seen)
            while num_seen < running.num_tokens:
                wanted = num_seen + 1 if is_stream else running.num_tokens
                fault_at = self._faults.strikes_at(request)
                if fault_at is not None:
                    wanted = min(wanted, fault_at)
                num_seen = await running.wait(wanted, self._timeout_s)
                if fault_at is not None:
                    num_seen = min(num_seen, fault_at)
                yield num_seen
                await self._faults.strike_after(request, num_seen)
        finally:
            self._loop.leave(running)

    async def _stream(
        self,
        chat: ChatRequest,
        head: Answer,
        planned: SimAnswer,
        progress: AsyncGenerator[int],
        stream: AnswerStream,
    ) -> web.StreamResponse:
        answer = AnswerEvents(head, chat, planned.token_ids)
        events = answer.begin()
        num_sent = len(chat.generated_token_ids)
        async for num_tokens in progress:
            for number in range(num_sent, num_tokens):
                events += answer.text(planned.pieces[number], number + 1)
            num_sent = num_tokens
            if num_sent < planned.num_tokens and events:
                await stream.write(events)
                events = b""
        events += answer.end(planned.finish_reason, planned.num_tokens)
        await stream.write(events)
        return stream.response

    def _check(self, chat: ChatRequest, descriptor: RoomDescriptor) -> None:
        """Refuse KV of another model, or of another request: somebody has mixed up rooms."""
        if descriptor.layout != self._model.kv_layout:
            raise WorkerError("prefill and decode simulate different models: give both one profile")
        seed = prompt_seed(chat, self._profile.seed)
        first_token_id = token_id_after(seed, chat.generated_token_ids)
        if (descriptor.seed, descriptor.first_token_id) != (seed, first_token_id):
            raise WorkerError(
                f"room {descriptor.room} holds another prompt, or prefill and decode have "
                "profiles of different seeds"
            )
