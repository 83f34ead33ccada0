"""What a chat request asks of the engine: how to sample, how long, and what must be refused.

What the torch engine cannot do is refused by name, never silently ignored. An image's `detail` is
no exception: it asks for more or less care, and every image gets all that the model's pixel budget
allows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from epd.engines.torch.sampler import Sampling
from epd.errors import BadRequestError
from epd.wire import ChatRequest

_Test = Callable[[Any], bool]


def _is_set(value: Any) -> bool:
    return bool(value)


def _is_not(*neutral: Any) -> _Test:
    return lambda value: value is not None and value not in neutral


# Field → whether its value changes what the answer means. A client library often sends defaults
# explicitly: those are harmless and pass.
_REFUSED: dict[str, _Test] = {
    "n": _is_not(1),
    "best_of": _is_not(1),
    "tools": _is_set,
    "functions": _is_set,
    "tool_choice": _is_not("none", "auto"),
    "function_call": _is_not("none", "auto"),
    "logprobs": _is_set,
    "top_logprobs": _is_set,
    "logit_bias": _is_set,
    "response_format": lambda value: _is_set(value) and value != {"type": "text"},
    "frequency_penalty": _is_not(0),
    "presence_penalty": _is_not(0),
    "repetition_penalty": _is_not(1),
    "min_p": _is_not(0),
    "top_k": _is_not(-1, 0),
    "min_tokens": _is_not(0),
    "ignore_eos": _is_set,
    "audio": _is_set,
    "modalities": lambda value: _is_set(value) and value != ["text"],
    "prediction": _is_set,
    "regex": _is_set,
    "json_schema": _is_set,
    "ebnf": _is_set,
    "lora_path": _is_set,
}


def check_supported(request: ChatRequest) -> None:
    """Refuse what this engine cannot do.

    Raises:
        BadRequestError: naming the first field whose value asks for it.
    """
    extra = request.model_extra or {}
    for name, changes_meaning in _REFUSED.items():
        if name in extra and changes_meaning(extra[name]):
            raise BadRequestError(
                f"{name} is not supported by the torch engine: leave it out", param=name
            )
    for index, message in enumerate(request.messages):
        if message.role == "tool":
            raise BadRequestError(
                "tool messages are not supported by the torch engine",
                param=f"messages[{index}].role",
            )
        if (message.model_extra or {}).get("tool_calls"):
            raise BadRequestError(
                "tool calls are not supported by the torch engine",
                param=f"messages[{index}].tool_calls",
            )


def sampling_of(request: ChatRequest, seed: int) -> Sampling:
    """How the request samples; what it leaves out has OpenAI's default."""
    default = Sampling()
    return Sampling(
        temperature=default.temperature if request.temperature is None else request.temperature,
        top_p=default.top_p if request.top_p is None else request.top_p,
        seed=seed,
    )
