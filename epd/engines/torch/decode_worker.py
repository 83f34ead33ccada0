"""The decode stage: takes KV over from a prefill worker and answers in OpenAI's shape.

/v1/chat/completions  ask the room → take blocks → have KV sent → join the running batch →
                      stream or collect the text

An answer that another worker began is continued from its tokens: see `Detokenizer.replay`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web
from tokenizers import Tokenizer

from epd.engines.contract.answer_stream import AnswerStream
from epd.engines.contract.answers import Answer, AnswerEvents
from epd.engines.contract.context_limits import ContextLimits
from epd.engines.shell import Shell, StageWorker
from epd.engines.torch.chat_options import check_supported, sampling_of
from epd.engines.torch.decode_loop import DecodeLoop, Running
from epd.engines.torch.detokenizer import Detokenizer, TextDelta
from epd.engines.torch.engine import DecodeSlot
from epd.engines.torch.kv_intake import KVIntake
from epd.engines.torch.kv_stage import KVStage
from epd.errors import BadRequestError, EPDError
from epd.wire import ChatRequest, Load, RoomDescriptor, load_json, parse_chat_request

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Generation:
    """One answer as it comes."""

    answer: Answer
    deltas: AsyncIterator[TextDelta]
    detokenizer: Detokenizer


class DecodeWorker(StageWorker):
    """See `epd.engines.shell.StageWorker`."""

    def __init__(
        self,
        shell: Shell,
        *,
        tokenizer: Tokenizer,
        eos_token_ids: Collection[int],
        kv: KVStage,
        intake: KVIntake,
        loop: DecodeLoop,
        limits: ContextLimits,
        timeout_s: float,
    ) -> None:
        """Wire the parts together; `timeout_s` bounds each single wait of a request."""
        self._shell = shell
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._kv = kv
        self._intake = intake
        self._loop = loop
        self._limits = limits
        self._timeout_s = timeout_s
        kv.publish_gauges()

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
                    return await self._answer(chat, chat.rid, stream)
        except EPDError as error:
            if stream is None or not stream.has_begun:
                raise
            return await stream.fail(error)
        except Exception:
            if stream is None or not stream.has_begun:
                raise
            _log.exception("a stream failed", extra={"request_id": chat.rid})
            return await stream.fail(EPDError("internal error: see the worker's log"))

    def load(self) -> Load:
        return self._kv.load(
            num_running=self._loop.num_running,
            num_waiting_tokens=self._kv.lender.num_waiting_tokens,
        )

    def describe(self) -> dict[str, Any]:
        return self._kv.describe()

    async def close(self) -> None:
        await self._loop.close()

    async def _answer(
        self, chat: ChatRequest, rid: str, stream: AnswerStream | None
    ) -> web.StreamResponse:
        self._shell.lifecycle.check_accepts_work()
        check_supported(chat)
        descriptor = await self._intake.describe(chat)
        async with self._generating(chat, rid, descriptor) as generation:
            if stream is None:
                return await self._collect(generation)
            return await self._stream(chat, generation, stream)

    @asynccontextmanager
    async def _generating(
        self, chat: ChatRequest, rid: str, descriptor: RoomDescriptor
    ) -> AsyncGenerator[_Generation]:
        """Take the KV and run the sequence while inside; everything is given back after."""
        num_prompt_tokens = descriptor.num_prompt_tokens
        self._limits.check(num_prompt_tokens, chat)
        max_new_tokens = self._limits.max_new_tokens(num_prompt_tokens, chat)
        detokenizer = await self._detokenizer(chat, max_new_tokens)
        block_ids = await self._intake.take(chat, descriptor, num_prompt_tokens + max_new_tokens)
        running: Running | None = None
        try:
            began_s = self._shell.clock.monotonic()
            # All tokens may be there, if the worker before ended in the middle of its last words.
            first = TextDelta("", detokenizer.finish_reason)
            if detokenizer.finish_reason is None:
                first = detokenizer.push(descriptor.first_token_id)
            if first.finish_reason is None:
                slot = DecodeSlot(
                    token_id=descriptor.first_token_id,
                    position=descriptor.next_position,
                    num_tokens=descriptor.num_kv_tokens,
                    block_ids=block_ids,
                    sampling=sampling_of(chat, descriptor.seed),
                )
                give_back = partial(self._kv.lender.give_back, block_ids)
                num_tokens = max_new_tokens - detokenizer.num_tokens
                running = self._loop.join(slot, num_tokens, on_left=give_back)
            async with aclosing(self._deltas(first, running, detokenizer)) as deltas:
                answer = Answer.to(chat, rid, descriptor, self._shell)
                yield _Generation(answer, deltas, detokenizer)
            num_tokens = detokenizer.num_tokens - len(chat.generated_token_ids)
            self._shell.span(rid, "decode", began_s, num_tokens=num_tokens)
        finally:
            if running is not None:
                running.leave()
            else:
                self._kv.lender.give_back(block_ids)

    async def _detokenizer(self, chat: ChatRequest, max_new_tokens: int) -> Detokenizer:
        """With the tokens that are there already; raises BadRequestError if they cannot be."""
        detokenizer = Detokenizer(
            self._tokenizer,
            eos_token_ids=self._eos_token_ids,
            max_new_tokens=max_new_tokens,
            stop_strings=chat.stop_strings,
        )
        if chat.generated_token_ids:
            await asyncio.to_thread(detokenizer.replay, chat.generated_token_ids)
        return detokenizer

    async def _deltas(
        self, first: TextDelta, running: Running | None, detokenizer: Detokenizer
    ) -> AsyncGenerator[TextDelta]:
        """The answer piece by piece; the last has a finish reason."""
        yield first
        while running is not None and detokenizer.finish_reason is None:
            yield detokenizer.push(await running.next_token(self._timeout_s))

    async def _collect(self, generation: _Generation) -> web.Response:
        text = ""
        async for delta in generation.deltas:
            text += delta.text
        reason = generation.detokenizer.finish_reason
        assert reason is not None, "an answer ends with a reason"
        num_tokens = generation.detokenizer.num_tokens
        return web.json_response(generation.answer.whole(text, reason, num_tokens))

    async def _stream(
        self, chat: ChatRequest, generation: _Generation, stream: AnswerStream
    ) -> web.StreamResponse:
        detokenizer = generation.detokenizer
        answer = AnswerEvents(generation.answer, chat, detokenizer.token_ids)
        events = answer.begin()
        async for delta in generation.deltas:
            events += answer.text(delta.text, detokenizer.num_tokens)
            if delta.finish_reason is not None:
                events += answer.end(delta.finish_reason, detokenizer.num_tokens)
            if events:
                await stream.write(events)
                events = b""
        return stream.response
