"""The OpenAI chat request: the fields EPD itself reads; all others travel on untouched."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_validator,
)

from epd.errors import BadRequestError
from epd.wire.parsing import parse


def _check_text(text: str) -> str:
    """Half of a surrogate pair is valid JSON but no text: tokenizers fail on it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("the text holds half of a surrogate pair: send valid Unicode") from None
    return text


Text = Annotated[str, AfterValidator(_check_text)]


class _Open(BaseModel):
    """Unknown fields are kept: an engine may know them even if EPD does not."""

    model_config = ConfigDict(extra="allow")


class ImageURL(_Open):
    url: str = Field(min_length=1)
    detail: Literal["auto", "low", "high"] | None = None
    content_hash: str | None = None


class TextPart(_Open):
    type: Literal["text"]
    text: Text


class ImagePart(_Open):
    type: Literal["image_url"]
    image_url: ImageURL


def _part_tag(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"part:{kind}" if isinstance(kind, str) else None


Part = Annotated[
    Annotated[TextPart, Tag("part:text")] | Annotated[ImagePart, Tag("part:image_url")],
    Discriminator(
        _part_tag,
        custom_error_type="unknown_part",
        custom_error_message='each content part needs a "type": "text" or "image_url"',
    ),
]


class Message(_Open):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[Part] | None = None

    @field_validator("content")
    @classmethod
    def _not_empty(cls, content: str | list[Part] | None) -> str | list[Part] | None:
        if content is not None and not content:
            raise ValueError("content must not be empty")
        return content

    @property
    def images(self) -> list[tuple[int, ImagePart]]:
        """(index in `content`, part) of each image, in order."""
        if not isinstance(self.content, list):
            return []
        return [(i, part) for i, part in enumerate(self.content) if isinstance(part, ImagePart)]


class StreamOptions(_Open):
    include_usage: bool = False


class ContinueFrom(_Open):
    """Where an answer was broken off whose stream another worker has begun."""

    token_ids: list[Annotated[int, Field(strict=True, ge=0)]]
    """All that were generated, as the `token_ids` of the chunks that were sent tell them."""
    id: str | None = Field(default=None, min_length=1)
    """`id` of the chunks that were sent, which the others repeat."""
    created: int | None = Field(default=None, ge=0)
    """`created` of the chunks that were sent."""


class ChatRequest(_Open):
    """`POST /v1/chat/completions`, as a client sends it and as a worker receives it."""

    model: str = Field(min_length=1)
    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: Text | list[Text] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    # Set by the coordinator, never by a client (see `COORDINATOR_FIELDS`).
    rid: str | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    bootstrap_room: int | None = None
    return_token_ids: bool = False
    """Each chunk of the stream tells the tokens that were generated since the one before."""
    continue_from: ContinueFrom | None = None
    """Stream only what follows, as though the tokens had been generated here."""

    @field_validator("messages")
    @classmethod
    def _contents_present(cls, messages: list[Message]) -> list[Message]:
        for index, message in enumerate(messages):
            if message.content is None and message.role not in ("assistant", "tool"):
                raise BadRequestError(
                    f"messages[{index}].content is missing", param=f"messages[{index}].content"
                )
        return messages

    @field_validator("stop")
    @classmethod
    def _few_stops(cls, stop: str | list[str] | None) -> str | list[str] | None:
        stops = [stop] if isinstance(stop, str) else stop or []
        if len(stops) > 4:
            raise ValueError("at most 4 stop strings are allowed")
        if any(not text for text in stops):
            raise ValueError("a stop string must not be empty")
        return stop

    @property
    def max_new_tokens(self) -> int | None:
        """The limit on generated tokens; `max_completion_tokens` is OpenAI's newer name."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def generated_token_ids(self) -> list[int]:
        """The tokens of the answer to continue from; none of an answer that begins."""
        return self.continue_from.token_ids if self.continue_from is not None else []

    @property
    def images(self) -> list[tuple[str, ImagePart]]:
        """(field path of the URL, part) of every image of the conversation, in order."""
        return [
            (f"messages[{m}].content[{p}].image_url.url", part)
            for m, message in enumerate(self.messages)
            for p, part in message.images
        ]


COORDINATOR_FIELDS = frozenset(
    {
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "continue_from",
        "data_parallel_rank",
        "disagg_prefill_dp_rank",
        "return_token_ids",
        "rid",
        "routed_dp_rank",
    }
)
"""Fields that steer workers. A client that sends one is refused: a chosen room could collide with
another request's and crash or read it (sglang#39428, #40125)."""


def parse_chat_request(document: dict[str, Any]) -> ChatRequest:
    """Validate a chat request.

    Args:
        document: the decoded JSON body (see `load_json`).

    Raises:
        BadRequestError: naming the field at fault.
    """
    request = parse(ChatRequest, document)
    if request.max_tokens and request.max_completion_tokens not in (None, request.max_tokens):
        raise BadRequestError(
            "max_tokens and max_completion_tokens disagree: send only one",
            param="max_completion_tokens",
        )
    for name in ("return_token_ids", "continue_from"):
        if getattr(request, name) and not request.stream:
            raise BadRequestError(f"{name} is for streams only: set stream", param=name)
    return request
