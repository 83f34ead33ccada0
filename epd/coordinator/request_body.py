"""A chat request's body: what a client sent, checked, weighed, and rewritten for the workers.

Only the fields that are ours change; all others reach the workers as the client sent them, and no
base64 does. Called by the coordinator; does no I/O.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from yarl import URL

import encoders
from epd.coordinator.transcript import Transcript
from epd.errors import BadRequestError
from epd.media import MediaItem
from epd.types import RequestId, Room
from epd.wire import (
    ChatRequest,
    ModelCard,
    WorkerReport,
    dump_json,
    load_json,
    parse_chat_request,
    wire_hash,
)
from epd.wire.chat import COORDINATOR_FIELDS

_LARGE_BYTES = 2**18  # takes a millisecond if it is text, and some tens in the worst case


@dataclass(frozen=True, slots=True)
class RequestBody:
    """One request's body, read. It may hold megabytes of base64: let go of it early."""

    document: dict[str, Any]
    request: ChatRequest
    """The fields of `document` that EPD reads."""
    num_bytes: int
    """As it was sent."""

    @classmethod
    async def read(cls, body: bytes | bytearray) -> RequestBody:
        """Decode and check what a client sent, in a thread if it is large.

        Raises:
            BadRequestError: naming the field at fault.
        """
        if len(body) <= _LARGE_BYTES:
            return cls._read(body)
        return await asyncio.to_thread(cls._read, body, is_patient=True)

    @classmethod
    def _read(cls, body: bytes | bytearray, *, is_patient: bool = False) -> RequestBody:
        document = load_json(body, is_patient=is_patient)
        for name in sorted(COORDINATOR_FIELDS & document.keys()):
            raise BadRequestError(f"{name} is set by the server: leave it out", param=name)
        # OpenAI's API takes it as false; SGLang refuses it.
        if document.get("stream", False) is None:
            del document["stream"]
        # SGLang 0.5.23 hangs at it in prefill and decode apart, or fails with images.
        if document.get("n") not in (None, 1):
            raise BadRequestError("only n = 1 is served: send the request n times", param="n")
        return cls(document, parse_chat_request(document), len(body))

    @property
    def image_urls(self) -> list[tuple[str, str]]:
        """(URL, field path) of every image, in order."""
        return [(part.image_url.url, path) for path, part in self.request.images]

    async def for_workers(
        self, items: Sequence[MediaItem], sign: Callable[[str], str]
    ) -> WorkerBody:
        """What prefill and decode get. Changes `document`. In a thread if it is large.

        Args:
            items: the request's images, in order.
            sign: gives the URL under which workers fetch the image of a content hash.

        Raises:
            BadRequestError: it cannot be written as JSON, although Python could read it.
        """
        document = self.document
        remaining = iter(items)
        for m, message in enumerate(self.request.messages):
            for p, _ in message.images:
                item = next(remaining)
                image_url = document["messages"][m]["content"][p]["image_url"]
                image_url["url"] = sign(item.content_hash)
                image_url["content_hash"] = wire_hash(item.content_hash)
        if self.num_bytes - sum(len(url) for url, _ in self.image_urls) <= _LARGE_BYTES:
            return WorkerBody(dump_json(document))
        return WorkerBody(await asyncio.to_thread(dump_json, document, is_patient=True))


@dataclass(frozen=True, slots=True)
class WorkerBody:
    """A body as workers get it, but for the fields of an attempt, which are added to its end."""

    document: bytes
    """A JSON object with at least one field, and none of `COORDINATOR_FIELDS`."""

    def of_attempt(
        self,
        rid: RequestId,
        room: Room,
        prefill: WorkerReport,
        transcript: Transcript | None = None,
    ) -> bytes:
        """The body of one attempt.

        Args:
            rid: the attempt's id.
            room: where the two workers meet.
            prefill: the worker that holds the room.
            transcript: what the client has of the answer, if others may have to go on with it.
        """
        fields = {
            "rid": rid,
            "bootstrap_room": room,
            # Without brackets, if it is an IPv6 address: whoever adds the port adds them.
            "bootstrap_host": URL(prefill.url).host,
            "bootstrap_port": prefill.bootstrap_port,
            **(transcript.fields if transcript else {}),
        }
        return b"".join((self.document[:-1], b", ", json.dumps(fields).encode()[1:]))


def count_image_tokens(card: ModelCard, item: MediaItem) -> int:
    """Tokens that `item` will become, exactly, from its width and height alone."""
    if card.image_budget is None:
        return 0
    family = encoders.family_of(card.model_type)
    return family.image_tokens(item.width, item.height, card.image_budget)
