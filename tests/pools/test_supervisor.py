"""The supervisor against small real processes."""

import asyncio
import contextlib
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from epd.clock import FakeClock
from epd.errors import ConfigError, WorkerError
from epd.pools.local import Backoff, Child, ChildSpec, FileLog, StoppedError, Supervisor
from epd.types import Stage

FAST = {"first_s": 0.01, "longest_s": 0.05}


class MemoryLog:
    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def write(self, name: str, stage: Stage | None, line: str) -> None:
        self.lines.append((name, line))

    def of(self, name: str) -> list[str]:
        return [line for child, line in self.lines if child == name]


def script(text: str) -> tuple[str, ...]:
    return (sys.executable, "-u", "-c", textwrap.dedent(text))


SLEEPS = """
    import time
    print("up", flush=True)
    time.sleep(60)
"""
DRAINS = """
    import signal, sys, time
    def drain(*_):
        print("draining", flush=True)
        time.sleep(0.3)
        print("drained", flush=True)
        sys.exit(0)
    signal.signal(signal.SIGTERM, drain)
    print("up", flush=True)
    while True:
        time.sleep(0.05)
"""
IGNORES_SIGTERM = """
    import signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("up", flush=True)
    while True:
        time.sleep(0.05)
"""


def child(log: MemoryLog, text: str, name: str = "encode-0", **options: object) -> Child:
    options.setdefault("backoff", Backoff(**FAST))
    spec = ChildSpec(name, script(text), Stage.ENCODE)
    return Child(spec, log, **options)  # pyright: ignore[reportArgumentType]


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - other processes have no event to await
            await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z"
    return False


def test_backoff_doubles_up_to_its_limit_and_forgets_after_a_good_run() -> None:
    backoff = Backoff(first_s=1, longest_s=5, ran_well_s=10)
    assert [backoff.delay_s(0) for _ in range(5)] == [1, 2, 4, 5, 5]
    assert backoff.delay_s(10) == 1
    assert backoff.delay_s(9.9) == 2


def test_backoff_survives_a_thousand_crashes() -> None:
    backoff = Backoff(first_s=1, longest_s=30)
    assert {backoff.delay_s(0) for _ in range(1000)} == {1, 2, 4, 8, 16, 30}


async def test_a_crashed_child_is_started_again_and_says_so() -> None:
    log = MemoryLog()
    crasher = child(log, "import sys; print('boom'); sys.exit(1)")
    task = asyncio.create_task(crasher.run())
    await until(lambda: crasher.num_starts >= 3)
    crasher.kill()
    await task
    lines = log.of("encode-0")
    assert lines[0] == "boom"
    assert lines[1] == "exited with code 1; starting again in 0.0 s"


async def test_the_wait_before_a_restart_does_not_count_as_running() -> None:
    clock = FakeClock()
    ran: list[float] = []

    class Watching(Backoff):
        def delay_s(self, ran_s: float) -> float:
            ran.append(ran_s)
            clock.advance(7)
            return 0.01

    crasher = child(MemoryLog(), "raise SystemExit(1)", backoff=Watching(), clock=clock)
    task = asyncio.create_task(crasher.run())
    await until(lambda: crasher.num_starts >= 2)
    crasher.kill()
    await task
    assert set(ran) == {0.0}


async def test_a_child_killed_by_a_signal_is_named_with_it() -> None:
    log = MemoryLog()
    victim = child(log, SLEEPS)
    task = asyncio.create_task(victim.run())
    await until(lambda: "up" in log.of("encode-0"))
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    await until(lambda: victim.num_starts == 2)
    victim.kill()
    await task
    assert "killed by SIGKILL; starting again in 0.0 s" in log.of("encode-0")


async def test_a_wrong_configuration_is_not_retried() -> None:
    text = "import sys; print('epd: model nope is not there', file=sys.stderr); sys.exit(2)"
    broken = child(MemoryLog(), text)
    with pytest.raises(ConfigError, match=r"^encode-0: model nope is not there$"):
        await broken.run()
    assert broken.num_starts == 1


async def test_a_child_gives_up_after_the_allowed_crashes() -> None:
    broken = child(MemoryLog(), "print('no luck'); raise SystemExit(1)", max_crashes=2)
    with pytest.raises(WorkerError, match="encode-0 exited with code 1: no luck"):
        await broken.run()
    assert broken.num_starts == 2


async def test_a_program_that_does_not_exist_is_one_clear_error() -> None:
    missing = Child(ChildSpec("encode-0", ("/nonexistent/epd",)), MemoryLog())
    with pytest.raises(ConfigError, match="cannot start /nonexistent/epd"):
        await missing.run()


async def test_lines_longer_than_any_buffer_and_without_an_end_are_passed_on() -> None:
    log = MemoryLog()
    talker = child(log, "print('x' * 300_000); print('é', end='')", max_crashes=1)
    with pytest.raises(WorkerError):
        await talker.run()
    lines = log.of("encode-0")
    assert "".join(lines[:-1]) == "x" * 300_000
    assert lines[-1] == "é"


async def test_workers_drain_before_the_coordinator_is_asked_to_leave() -> None:
    log = MemoryLog()
    coordinator = child(log, DRAINS, "coordinator")
    workers = [child(log, DRAINS, name) for name in ("encode-0", "decode-0")]
    async with Supervisor(coordinator, workers):
        await until(lambda: sum(line == "up" for _, line in log.lines) == 3)
    order = [entry for entry in log.lines if entry[1] != "up"]
    assert set(order[:2]) == {("encode-0", "draining"), ("decode-0", "draining")}
    assert order.index(("coordinator", "draining")) > order.index(("encode-0", "drained"))
    assert order[-1] == ("coordinator", "drained")


async def test_a_child_that_ignores_sigterm_is_killed_after_the_bound() -> None:
    log = MemoryLog()
    coordinator, stubborn = child(log, DRAINS, "coordinator"), child(log, IGNORES_SIGTERM)
    started_s = time.monotonic()
    async with Supervisor(coordinator, [stubborn], drain_s=0.3):
        await until(lambda: "up" in log.of("encode-0") and "up" in log.of("coordinator"))
        pid = stubborn.pid
        assert pid is not None
    assert not is_alive(pid)
    assert time.monotonic() - started_s < 10


async def test_a_second_ctrl_c_kills_at_once() -> None:
    log = MemoryLog()
    coordinator, stubborn = child(log, DRAINS, "coordinator"), child(log, IGNORES_SIGTERM)
    loop = asyncio.get_running_loop()
    async with Supervisor(coordinator, [stubborn], drain_s=60) as supervisor:
        await until(lambda: "up" in log.of("encode-0") and "up" in log.of("coordinator"))
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(StoppedError):
            await supervisor.guard(asyncio.sleep(60))
        started_s = time.monotonic()
        loop.call_later(0.2, os.kill, os.getpid(), signal.SIGINT)
    assert time.monotonic() - started_s < 5
    assert stubborn.pid is None


async def test_what_a_child_started_goes_with_it() -> None:
    log = MemoryLog()
    text = """
        import subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        print(child.pid, flush=True)
        time.sleep(60)
    """
    parent = child(log, text)
    async with Supervisor(child(log, SLEEPS, "coordinator"), [parent]):
        await until(lambda: len(log.of("encode-0")) == 1)
        grandchild = int(log.of("encode-0")[0])
        assert is_alive(grandchild)
    await until(lambda: not is_alive(grandchild))


async def test_a_grandchild_that_keeps_the_output_open_does_not_hide_a_crash() -> None:
    log = MemoryLog()
    text = """
        import subprocess, sys
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        sys.exit(1)
    """
    parent = child(log, text)
    task = asyncio.create_task(parent.run())
    await until(lambda: parent.num_starts >= 2)
    parent.kill()
    await task


async def test_guard_ends_when_a_child_cannot_work() -> None:
    log = MemoryLog()
    broken = child(log, "print('bad key'); raise SystemExit(2)")
    was_cancelled = asyncio.Event()

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            was_cancelled.set()
            raise

    async with Supervisor(child(log, DRAINS, "coordinator"), [broken]) as supervisor:
        with pytest.raises(ConfigError, match="encode-0: bad key"):
            await supervisor.guard(wait())
    assert was_cancelled.is_set()


async def test_guard_gives_the_result_and_the_error_of_the_work() -> None:
    async def fails() -> None:
        raise WorkerError("no answer")

    log = MemoryLog()
    async with Supervisor(child(log, SLEEPS, "coordinator"), []) as supervisor:
        assert await supervisor.guard(asyncio.sleep(0, "done")) == "done"
        with pytest.raises(WorkerError, match="no answer"):
            await supervisor.guard(fails())


async def test_a_stop_asked_while_a_child_waits_to_be_restarted_ends_it() -> None:
    crasher = child(MemoryLog(), "raise SystemExit(1)", backoff=Backoff(first_s=60, longest_s=60))
    task = asyncio.create_task(crasher.run())
    await until(lambda: crasher.num_starts == 1 and crasher.pid is None)
    crasher.terminate()
    async with asyncio.timeout(2):
        await task


async def test_an_unwritable_log_does_not_stop_the_child() -> None:
    class Full(MemoryLog):
        def write(self, name: str, stage: Stage | None, line: str) -> None:
            super().write(name, stage, line)
            raise OSError(28, "No space left on device")

    log = Full()
    talker = child(log, "print(1); print(2); raise SystemExit(1)", max_crashes=1)
    with pytest.raises(WorkerError):
        await talker.run()
    assert log.of("encode-0") == ["1", "2"]


def test_a_file_log_writes_one_file_for_each_child(tmp_path: Path) -> None:
    log = FileLog(tmp_path / "logs")
    log.write("encode-0", Stage.ENCODE, "one")
    log.write("coordinator", None, "two")
    log.write("encode-0", Stage.ENCODE, "three")
    assert (tmp_path / "logs" / "encode-0.log").read_text() == "one\nthree\n"
    assert (tmp_path / "logs" / "coordinator.log").read_text() == "two\n"
