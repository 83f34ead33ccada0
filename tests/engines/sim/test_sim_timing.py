"""How long simulated work takes, in time that only the simulation moves."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from prometheus_client import CollectorRegistry

from epd.clock import FakeClock
from epd.engines.shell import WorkerMetrics
from epd.engines.sim.decode_loop import DecodeLoop, Running
from epd.engines.sim.encode_batches import EncodeBatches
from epd.engines.sim.link import Link
from epd.engines.sim.pace import Pace
from epd.engines.sim.profile import DecodeProfile, EncodeProfile, TransferProfile


class Time:
    """A clock that moves when somebody sleeps. For one sleeper at a time."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self._start_s = self.clock.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)
        self.clock.advance(seconds)

    @property
    def ms(self) -> float:
        return (self.clock.monotonic() - self._start_s) * 1000

    def pace(self, time_scale: float = 1.0, jitter_ratio: float = 0.0, seed: int = 0) -> Pace:
        return Pace(
            self.clock,
            sleep=self.sleep,
            time_scale=time_scale,
            jitter_ratio=jitter_ratio,
            random=Random(seed),
        )


@pytest.fixture
def now() -> Time:
    return Time()


@pytest.fixture
def metrics() -> WorkerMetrics:
    return WorkerMetrics(CollectorRegistry())


async def test_images_that_wait_are_encoded_as_one_batch(now: Time, metrics: WorkerMetrics) -> None:
    profile = EncodeProfile(base_ms=10, ms_per_image_token=0.1, max_batch_image_tokens=500)
    batches = EncodeBatches(profile, now.pace(), metrics)
    ended_ms: dict[int, float] = {}

    async def encode(num_tokens: int) -> None:
        await batches.encode(num_tokens)
        ended_ms[num_tokens] = now.ms

    await asyncio.gather(*(encode(n) for n in (200, 300, 100)))
    # 200 and 300 fill a batch: 10 + 50 ms; 100 comes after it: 10 + 10 ms.
    assert ended_ms == pytest.approx({200: 60, 300: 60, 100: 80})


async def test_a_waiting_image_that_is_cancelled_takes_no_time(
    now: Time, metrics: WorkerMetrics
) -> None:
    profile = EncodeProfile(base_ms=10, ms_per_image_token=0, max_batch_image_tokens=1)
    batches = EncodeBatches(profile, now.pace(), metrics)
    tasks = [asyncio.create_task(batches.encode(1)) for _ in range(3)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert now.ms == pytest.approx(20)
    assert batches.num_waiting == 0


async def test_a_decode_step_takes_longer_with_more_sequences_and_more_kv(
    now: Time, metrics: WorkerMetrics
) -> None:
    profile = DecodeProfile(base_ms=5, ms_per_sequence=1, ms_per_1000_kv_tokens=2)
    loop = DecodeLoop(profile, now.pace(), now.clock, metrics)
    short, long = Running(3, 1000, slow_factor=1), Running(4, 3000, slow_factor=1)
    loop.join(short)
    loop.join(long)
    await short.wait(3, timeout_s=5)
    # Two steps of two sequences: 5 + 2 ms, and 2 ms for each 1000 of 4000 tokens, then 4002.
    assert now.ms == pytest.approx(2 * 7 + 8 + 8.004)
    await long.wait(4, timeout_s=5)
    # One more of one sequence with 3002 tokens.
    assert now.ms == pytest.approx(2 * 7 + 8 + 8.004 + 6 + 6.004)
    assert loop.num_running == 0


async def test_a_slow_sequence_slows_the_batch_it_is_in(now: Time, metrics: WorkerMetrics) -> None:
    profile = DecodeProfile(base_ms=10, ms_per_sequence=0, ms_per_1000_kv_tokens=0)
    loop = DecodeLoop(profile, now.pace(), now.clock, metrics)
    other, slow = Running(3, 1, slow_factor=1), Running(2, 1, slow_factor=5)
    loop.join(other)
    loop.join(slow)
    await other.wait(3, timeout_s=5)
    assert now.ms == pytest.approx(50 + 10)


async def test_a_sequence_over_the_limit_waits_for_a_place(
    now: Time, metrics: WorkerMetrics
) -> None:
    profile = DecodeProfile(
        base_ms=10, ms_per_sequence=0, ms_per_1000_kv_tokens=0, max_running_requests=1
    )
    loop = DecodeLoop(profile, now.pace(), now.clock, metrics)
    first, second = Running(3, 1, slow_factor=1), Running(2, 1, slow_factor=1)
    loop.join(first)
    loop.join(second)
    await second.wait(2, timeout_s=5)
    assert now.ms == pytest.approx(30)


async def test_hand_offs_of_one_sender_follow_one_another(now: Time) -> None:
    link = Link(TransferProfile(latency_ms=1, ms_per_mib=2), now.pace())
    await asyncio.gather(link.send(2**20), link.send(3 * 2**20))
    assert now.ms == pytest.approx((1 + 2) + (1 + 6))


def test_a_time_scale_shortens_all_times_and_jitter_is_seeded(now: Time) -> None:
    assert now.pace(time_scale=0.1).seconds(50) == pytest.approx(0.005)

    def times(seed: int) -> list[float]:
        pace = now.pace(jitter_ratio=0.2, seed=seed)
        return [pace.seconds(1000) for _ in range(100)]

    assert times(1) == times(1)
    assert times(1) != times(2)
    assert 0.8 <= min(times(1)) < 0.85 < 1.15 < max(times(1)) <= 1.2
