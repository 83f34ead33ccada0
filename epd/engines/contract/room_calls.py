"""What a decode worker asks of the prefill worker that holds its room."""

from __future__ import annotations

from epd.addresses import http_url
from epd.engines.shell import PeerClient
from epd.errors import BadRequestError, WorkerError
from epd.wire import ChatRequest, RoomDescriptor, RoomSendRequest, SendResponse

_PREFILL = "the prefill worker"


class RoomCalls:
    """The two calls about a room; `timeout_s` bounds each.

    Both raise the prefill worker's own error, DeadlineError, or WorkerError if it cannot be
    reached; BadRequestError if the request does not say where its room is.
    """

    def __init__(self, peers: PeerClient, timeout_s: float) -> None:
        self._peers = peers
        self._timeout_s = timeout_s

    async def describe(self, chat: ChatRequest) -> RoomDescriptor:
        """The terms of the request's room, once prefill is done."""
        descriptor = await self._peers.call(
            "GET", _room_url(chat), RoomDescriptor, peer=_PREFILL, timeout_s=self._timeout_s
        )
        num_generated = len(chat.generated_token_ids)
        if descriptor.num_generated_tokens != num_generated:
            raise WorkerError(
                f"prefill continues from {descriptor.num_generated_tokens} generated tokens, and "
                f"decode from {num_generated}: is prefill of another version?"
            )
        return descriptor

    async def send(self, chat: ChatRequest, message: RoomSendRequest) -> SendResponse:
        """Have the room's KV written; returns when all of it has arrived."""
        return await self._peers.call(
            "POST",
            f"{_room_url(chat)}/send",
            SendResponse,
            peer=_PREFILL,
            message=message,
            timeout_s=self._timeout_s,
        )


def _room_url(chat: ChatRequest) -> str:
    """Where the request's room is.

    Raises:
        BadRequestError: the request does not say.
    """
    host, port, room = chat.bootstrap_host, chat.bootstrap_port, chat.bootstrap_room
    if host is None or port is None or room is None:
        raise BadRequestError(
            "a decode worker needs bootstrap_host, bootstrap_port and bootstrap_room",
            param="bootstrap_host",
        )
    return f"{http_url(host, port)}/bootstrap/rooms/{room}"
