"""How long a conversation may be on a worker, and the error that says so."""

from __future__ import annotations

from dataclasses import dataclass

from epd.errors import BadRequestError, ContextLengthError
from epd.wire import ChatRequest


@dataclass(frozen=True, slots=True)
class ContextLimits:
    """How long a conversation may be on this worker."""

    context_tokens: int
    """Longest prompt plus answer: the model's limit or the operator's, and what the pool holds."""
    default_new_tokens: int
    """Longest answer of a client that sets no limit, so that it cannot take the whole pool."""

    def check_least(self, num_prompt_tokens: int) -> None:
        """Refuse a prompt of at least so many tokens, before they are counted.

        Raises:
            ContextLengthError: it cannot fit.
        """
        if num_prompt_tokens >= self.context_tokens:
            raise ContextLengthError(
                f"the prompt has {num_prompt_tokens} tokens or more; the context holds "
                f"{self.context_tokens}, the answer included: shorten the messages",
                param="messages",
            )

    def check(self, num_prompt_tokens: int, request: ChatRequest) -> None:
        """Refuse a conversation that cannot fit, as OpenAI does, instead of cutting it.

        Args:
            num_prompt_tokens: without those of an answer that is continued.
            request: the conversation.

        Raises:
            ContextLengthError: naming `messages`, or the limit on new tokens if that is too high.
            BadRequestError: the answer to continue is longer than it may become.
        """
        limit = self.context_tokens
        if num_prompt_tokens + 1 > limit:
            raise ContextLengthError(
                f"the prompt has {num_prompt_tokens} tokens; the context holds {limit}, the "
                "answer included: shorten the messages or send fewer or smaller images",
                param="messages",
            )
        asked = request.max_new_tokens
        if asked is not None and num_prompt_tokens + asked > limit:
            field = "max_completion_tokens" if request.max_completion_tokens else "max_tokens"
            raise ContextLengthError(
                f"{num_prompt_tokens} prompt tokens and {field} {asked} exceed the context of "
                f"{limit} tokens: ask for at most {limit - num_prompt_tokens}",
                param=field,
            )
        longest = limit - num_prompt_tokens if asked is None else asked
        if len(request.generated_token_ids) > longest:
            raise BadRequestError(
                f"continue_from.token_ids has {len(request.generated_token_ids)} tokens, and the "
                f"answer may have {longest}",
                param="continue_from.token_ids",
            )

    def max_new_tokens(self, num_prompt_tokens: int, request: ChatRequest) -> int:
        """The longest answer; `check` has passed."""
        if request.max_new_tokens is not None:
            return request.max_new_tokens
        return min(self.context_tokens - num_prompt_tokens, self.default_new_tokens)
