import asyncio

import pytest

from epd.clock import FakeClock
from epd.engines.contract.rooms import RoomState, RoomTable
from epd.errors import BadRequestError, DeadlineError, MediaError, WorkerError
from epd.types import Room
from epd.wire import KVLayout, RoomDescriptor

LAYOUT = KVLayout(
    num_layers=1,
    block_tokens=16,
    num_kv_heads=1,
    head_dim=8,
    dtype="float32",
    model_fingerprint="f",
)


def descriptor(room: int, generation: int) -> RoomDescriptor:
    return RoomDescriptor(
        room=room,
        generation=generation,
        num_prompt_tokens=3,
        next_position=3,
        first_token_id=1,
        seed=0,
        num_blocks=1,
        layout=LAYOUT,
    )


@pytest.fixture
def rooms() -> RoomTable:
    return RoomTable(FakeClock())


async def test_a_room_goes_from_prefill_to_decode_and_is_closed(rooms: RoomTable):
    entry = rooms.open(Room(7), "r")
    assert rooms.num_open == 1
    entry.publish(descriptor(7, entry.generation), [64])
    assert (await rooms.wait_prefilled(Room(7), 1)) is entry
    assert rooms.begin_send(Room(7), entry.generation) is entry
    entry.finish()
    await entry.wait_taken(1)
    rooms.close(entry)
    assert entry.state is RoomState.CLOSED
    assert rooms.num_open == 0


async def test_decode_may_wait_before_prefill_has_begun(rooms: RoomTable):
    waiting = asyncio.create_task(rooms.wait_prefilled(Room(7), 5))
    await asyncio.sleep(0)
    assert rooms.num_open == 0
    entry = rooms.open(Room(7), "r")
    entry.publish(descriptor(7, entry.generation), [64])
    assert (await waiting) is entry


async def test_a_waiter_that_leaves_before_prefill_leaves_nothing(rooms: RoomTable):
    waiting = asyncio.create_task(rooms.wait_prefilled(Room(7), 5))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    with pytest.raises(DeadlineError):
        await rooms.wait_prefilled(Room(7), 0.001)
    assert not rooms._rooms


async def test_the_error_of_prefill_reaches_decode_now_and_later(rooms: RoomTable):
    waiting = asyncio.create_task(rooms.wait_prefilled(Room(7), 5))
    await asyncio.sleep(0)
    entry = rooms.open(Room(7), "r")
    entry.fail(MediaError("no image"))
    rooms.close(entry)
    with pytest.raises(MediaError):
        await waiting
    with pytest.raises(MediaError):
        await rooms.wait_prefilled(Room(7), 5)
    with pytest.raises(MediaError):
        rooms.begin_send(Room(7), entry.generation)


async def test_a_room_in_use_or_used_before_is_refused(rooms: RoomTable):
    entry = rooms.open(Room(7), "r")
    with pytest.raises(BadRequestError, match="used before"):
        rooms.open(Room(7), "other")
    rooms.close(entry)
    with pytest.raises(BadRequestError, match="used before"):
        rooms.open(Room(7), "other")


async def test_another_generation_and_a_second_taker_are_refused(rooms: RoomTable):
    entry = rooms.open(Room(7), "r")
    entry.publish(descriptor(7, entry.generation), [64])
    with pytest.raises(WorkerError, match="generation"):
        rooms.begin_send(Room(7), entry.generation + 1)
    rooms.begin_send(Room(7), entry.generation)
    with pytest.raises(WorkerError, match="sending"):
        rooms.begin_send(Room(7), entry.generation)


async def test_blocks_are_released_only_when_no_write_reads_them(rooms: RoomTable):
    released: list[bool] = []
    entry = rooms.open(Room(7), "r")
    entry.begin_reading()
    entry.when_unread(lambda: released.append(True))
    assert not released
    entry.end_reading()
    assert released == [True]
    entry.when_unread(lambda: released.append(True))
    assert released == [True, True]


async def test_a_write_is_given_up_when_the_room_ends(rooms: RoomTable):
    entry = rooms.open(Room(7), "r")
    write: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    giving_up = asyncio.create_task(entry.unless_ended(write))
    await asyncio.sleep(0)
    entry.fail(WorkerError("aborted"))
    with pytest.raises(WorkerError, match="aborted"):
        await giving_up
    assert write.cancelled()


async def test_an_illegal_transition_raises(rooms: RoomTable):
    entry = rooms.open(Room(7), "r")
    with pytest.raises(ValueError, match="prefilling to sending"):
        entry.move(RoomState.SENDING)


async def test_ended_rooms_are_forgotten_after_a_while():
    clock = FakeClock()
    rooms = RoomTable(clock)
    rooms.close(rooms.open(Room(7), "r"))
    clock.advance(61)
    assert rooms.open(Room(7), "r2").state is RoomState.PREFILLING
