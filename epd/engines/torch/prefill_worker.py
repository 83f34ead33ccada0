"""The prefill stage: a chat request in, its KV and first token out to a decode worker.

    /v1/chat/completions          tokenize, gather embeddings, compute, wait for decode
    GET  /bootstrap/rooms/{room}  decode asks what it needs to take over (long poll)
    POST /bootstrap/rooms/{room}/send   decode has room: write the KV there

Memory is the queue: a request holds its KV until decode has taken it, and a full pool makes the
next one wait.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from epd.engines.contract.rooms import OpenRoom, RoomTable
from epd.engines.shell import Shell, StageWorker
from epd.engines.torch.chat_options import check_supported
from epd.engines.torch.embedding_intake import EmbeddingIntake
from epd.engines.torch.kv_stage import KVStage
from epd.engines.torch.prefiller import Prefiller
from epd.errors import AbortedError, BadRequestError, EPDError, TransferError, WorkerError
from epd.transfer import Block
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


class PrefillWorker(StageWorker):
    """See `epd.engines.shell.StageWorker`."""

    def __init__(
        self,
        shell: Shell,
        *,
        prefiller: Prefiller,
        kv: KVStage,
        intake: EmbeddingIntake,
        timeout_s: float,
    ) -> None:
        """Wire the parts together; `timeout_s` bounds each single wait of a request."""
        self._shell = shell
        self._prefiller = prefiller
        self._kv = kv
        self._intake = intake
        self._timeout_s = timeout_s
        self._rooms = RoomTable(shell.clock)
        self._publish_gauges()

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
                    num_prompt_tokens = await self._carry_out(chat, entry)
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
        """Write the room's KV to the decode worker; the room is over, well or not."""
        message = parse(RoomSendRequest, await request.read())
        room = Room(int(request.match_info["room"]))
        entry = self._rooms.begin_send(room, message.generation)
        try:
            response = await self._write(entry, message)
        except EPDError as error:
            entry.fail(error)
            raise
        except BaseException:
            entry.fail(WorkerError("the decode worker left during the hand-off"))
            raise
        entry.finish()
        return web.json_response(response.model_dump())

    def load(self) -> Load:
        return self._kv.load(
            num_running=self._rooms.num_open,
            num_waiting_tokens=self._prefiller.num_waiting_tokens,
        )

    def describe(self) -> dict[str, Any]:
        return self._kv.describe()

    async def close(self) -> None:
        self._prefiller.close()

    async def _carry_out(self, chat: ChatRequest, entry: OpenRoom) -> int:
        """From messages to a room that decode has emptied; the number of prompt tokens."""
        # Inside the room, so that decode is told of a refusal instead of waiting for the room.
        self._shell.lifecycle.check_accepts_work()
        check_supported(chat)
        done = await self._prefiller.prefill(chat, entry.rid)
        try:
            entry.publish(
                RoomDescriptor(
                    room=entry.room,
                    generation=entry.generation,
                    num_prompt_tokens=done.prompt.num_prompt_tokens,
                    num_generated_tokens=done.prompt.num_generated,
                    next_position=done.prompt.next_position,
                    first_token_id=done.first_token_id,
                    seed=done.seed,
                    num_blocks=len(done.block_ids),
                    layout=self._kv.layout,
                ),
                self._kv.lender.addresses(done.block_ids),
            )
            await entry.wait_taken(self._timeout_s)
        finally:
            entry.when_unread(lambda: self._kv.lender.give_back(done.block_ids))
        return done.prompt.num_prompt_tokens

    async def _write(self, entry: OpenRoom, message: RoomSendRequest) -> SendResponse:
        began_s = self._shell.clock.monotonic()
        sources = entry.block_addresses
        if len(message.block_addresses) != len(sources):
            raise TransferError(
                f"{len(message.block_addresses)} addresses for {len(sources)} blocks of KV"
            )
        block_bytes = self._kv.lender.pool.shape.block_bytes
        blocks = [
            Block(source, destination, block_bytes)
            for source, destination in zip(sources, message.block_addresses, strict=True)
        ]
        entry.begin_reading()
        write = self._kv.transfer.write(
            message.session_id, blocks, timeout_s=self._timeout_s, on_settled=entry.end_reading
        )
        await entry.unless_ended(write)
        nbytes = len(blocks) * block_bytes
        self._shell.metrics.kv_bytes.labels("sent").inc(nbytes)
        self._shell.span(entry.rid, "kv_handoff", began_s, nbytes=nbytes)
        return SendResponse(nbytes=nbytes, duration_s=self._shell.clock.monotonic() - began_s)

    def _publish_gauges(self) -> None:
        def landed_bytes() -> int:
            return self._intake.arena.stats().used_bytes

        self._kv.publish_gauges()
        self._shell.metrics.arena_gauges(
            "embedding", used_bytes=landed_bytes, pinned_bytes=landed_bytes
        )
        self._shell.metrics.gauge(
            "epd_rooms_open",
            "Rooms with a prefill at work or KV to take",
            lambda: self._rooms.num_open,
        )
