"""From chat messages to KV and a first token: the computation of the prefill stage, step by step.

tokenize → check the length → have images encoded → expand the prompt → land the embeddings →
take KV blocks → compute, chunk by chunk → draw the first token

Of an answer that is continued, the tokens there are so far are computed as the prompt's end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from torch import Tensor

from epd.engines.contract.context_limits import ContextLimits
from epd.engines.shell import ComputeThread, Shell
from epd.engines.torch.chat_options import sampling_of
from epd.engines.torch.embedding_intake import EmbeddingIntake
from epd.engines.torch.engine import PrefillModel
from epd.engines.torch.kv_lender import KVLender
from epd.engines.torch.prompt import Prompt, PromptTokenizer
from epd.engines.torch.sampler import sample
from epd.errors import BadRequestError, OverloadedError
from epd.wire import ChatRequest


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A computed prompt. Whoever gets it owns its blocks."""

    prompt: Prompt
    block_ids: list[int]
    first_token_id: int
    seed: int


class Prefiller:
    """Prefills one request at a time, in order; the steps around the computation overlap."""

    def __init__(
        self,
        shell: Shell,
        *,
        tokenizer: PromptTokenizer,
        model: PrefillModel,
        intake: EmbeddingIntake,
        lender: KVLender,
        limits: ContextLimits,
        mint_seed: Callable[[], int],
        chunk_tokens: int,
        timeout_s: float,
    ) -> None:
        """Wire the parts together; `timeout_s` bounds each single wait of a request."""
        self._shell = shell
        self._tokenizer = tokenizer
        self._model = model
        self._intake = intake
        self._lender = lender
        self._limits = limits
        self._mint_seed = mint_seed
        self._chunk_tokens = chunk_tokens
        self._timeout_s = timeout_s
        self._text = ComputeThread(shell.clock, "text")
        # Sharing the computation between prompts would delay every first token.
        self._turn = asyncio.Lock()
        self.num_waiting_tokens = 0
        """Tokens of prompts that are expanded but not computed."""

    def close(self) -> None:
        self._text.close()

    async def prefill(self, chat: ChatRequest, rid: str) -> Prefilled:
        """Compute a request's prompt.

        Raises:
            EPDError: why not; nothing is held then, nor after cancellation.
        """
        self._check_vocabulary(chat.generated_token_ids)
        messages = [message.model_dump() for message in chat.messages]
        # A text far too long for the context would take minutes, and gigabytes, to tokenize.
        self._limits.check_least(self._tokenizer.least_tokens(messages))
        tokens = await self._text.run(self._tokenizer.tokenize, messages)
        # Each image takes at least the token that stands for it: refuse before encoding any.
        self._limits.check(len(tokens.token_ids), chat)
        images = await self._intake.encode(rid, chat)
        prompt = await self._text.run(
            self._tokenizer.expand, tokens, [image.grid for image in images]
        )
        self._limits.check(len(prompt.token_ids), chat)
        prompt = prompt.followed_by(chat.generated_token_ids)
        if not images:
            return await self._compute(chat, rid, prompt, None)
        async with self._intake.landed(rid, images) as embeddings:
            return await self._compute(chat, rid, prompt, embeddings)

    def _check_vocabulary(self, token_ids: Sequence[int]) -> None:
        vocab_size = self._model.vocab_size
        for index, token_id in enumerate(token_ids):
            if token_id >= vocab_size:
                path = f"continue_from.token_ids[{index}]"
                raise BadRequestError(
                    f"{path}: {token_id} is no token of this model, which has {vocab_size}",
                    param=path,
                )

    async def _compute(
        self, chat: ChatRequest, rid: str, prompt: Prompt, embeddings: Tensor | None
    ) -> Prefilled:
        """KV and first token; the caller owns the blocks of what is returned."""
        num_tokens = len(prompt.token_ids)
        self.num_waiting_tokens += num_tokens
        try:
            block_ids = await self._lender.lend(num_tokens, self._timeout_s)
            try:
                seed = self._mint_seed() if chat.seed is None else chat.seed
                async with _turn(self._turn, self._timeout_s):
                    began_s = self._shell.clock.monotonic()
                    first = await self._run_chunks(chat, prompt, embeddings, block_ids, seed)
                self._shell.span(rid, "prefill", began_s, num_tokens=num_tokens)
            except BaseException:
                self._lender.give_back(block_ids)
                raise
        finally:
            self.num_waiting_tokens -= num_tokens
        return Prefilled(prompt, block_ids, first, seed)

    async def _run_chunks(
        self,
        chat: ChatRequest,
        prompt: Prompt,
        embeddings: Tensor | None,
        block_ids: Sequence[int],
        seed: int,
    ) -> int:
        """One job per chunk, so that an abort or a shutdown waits for one chunk at most."""
        num_tokens = len(prompt.token_ids)
        sampling = sampling_of(chat, seed)

        def step(start: int) -> int | None:
            began_s = self._shell.clock.monotonic()
            stop = start + self._chunk_tokens
            logits = self._model.step(prompt, embeddings, block_ids, start, stop)
            is_last = stop >= num_tokens
            token_id = sample(logits[None], [sampling], [num_tokens])[0] if is_last else None
            seconds = self._shell.clock.monotonic() - began_s
            self._shell.metrics.step_seconds.labels("prefill").observe(seconds)
            return token_id

        token_id: int | None = None
        for start in range(0, num_tokens, self._chunk_tokens):
            token_id = await self._shell.compute.run(step, start)
        assert token_id is not None, "a prompt has at least one token"
        return token_id


@asynccontextmanager
async def _turn(lock: asyncio.Lock, timeout_s: float) -> AsyncGenerator[None]:
    try:
        async with asyncio.timeout(timeout_s):
            await lock.acquire()
    except TimeoutError:
        raise OverloadedError(f"prefill had no turn within {timeout_s:g} s") from None
    try:
        yield
    finally:
        lock.release()
