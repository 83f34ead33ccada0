"""A real deployment on this machine for tests: one coordinator and workers, each a process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from epd.auth import load_token

START_S = 90.0
"""Three workers importing torch at once on a busy 2-core machine."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Process:
    name: str
    log: Path
    popen: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        return self.popen.pid

    def stop(self, signum: int = signal.SIGTERM, timeout_s: float = 30.0) -> int:
        if self.popen.poll() is None:
            self.popen.send_signal(signum)
        return self.popen.wait(timeout_s)


@dataclass
class Cluster:
    """Starts, watches, kills and stops the processes; talks to them as an operator would."""

    root: Path
    model: str
    coordinator_config: Mapping[str, Any] = field(default_factory=dict)
    worker_options: tuple[str, ...] = ("--threads", "1")
    port: int = field(default_factory=free_port)
    processes: dict[str, Process] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def token_file(self) -> Path:
        return self.root / "token"

    @property
    def headers(self) -> dict[str, str]:
        return load_token(self.token_file).headers

    def start_coordinator(self) -> Process:
        config = self.root / "deployment.yaml"
        # JSON is YAML.
        config.write_text(json.dumps({"coordinator": dict(self.coordinator_config)}))
        return self._start(
            "coordinator",
            ["coordinator", "--config", str(config), "--port", str(self.port)],
        )

    def start_worker(self, stage: str, name: str | None = None, *options: str) -> Process:
        name = name or stage
        place = ["--stage", stage, "--coordinator", self.url, "--worker-id", name]
        options = ("--model", self.model, *self.worker_options, *options)
        return self._start(name, ["launch", *place, *options])

    def replace_worker(self, stage: str) -> None:
        """Start the stage's worker again and wait until the new one is known."""
        process = self.start_worker(stage)
        self._wait(
            lambda: (
                self.workers().get(stage, {}).get("pid") == process.pid
                and self.get("/ready") is not None
            )
        )

    def start(self) -> Cluster:
        self.start_coordinator()
        # The coordinator makes the token that the workers read.
        self._wait(lambda: self.token_file.exists() and self.get("/health") is not None)
        for stage in ("encode", "prefill", "decode"):
            self.start_worker(stage)
        self.wait_ready()
        return self

    def wait_ready(self) -> None:
        self._wait(lambda: self.get("/ready") is not None)

    def stop(self) -> None:
        for process in reversed(self.processes.values()):
            if process.popen.poll() is None:
                process.popen.terminate()
        for process in self.processes.values():
            try:
                process.popen.wait(20)
            except subprocess.TimeoutExpired:
                process.popen.kill()
                process.popen.wait(10)

    def get(self, path: str, base: str | None = None) -> str | None:
        """The body at `path`, or None if the status is not 200 or nobody listens."""

        async def fetch() -> str | None:
            try:
                async with (
                    aiohttp.ClientSession(headers=self.headers) as session,
                    session.get((base or self.url) + path) as response,
                ):
                    return await response.text() if response.status == 200 else None
            except aiohttp.ClientError:
                return None

        return asyncio.run(fetch())

    def workers(self) -> dict[str, dict[str, Any]]:
        """The registry's view, by worker id."""
        body = self.get("/admin/workers")
        assert body is not None, "the coordinator does not answer"
        return {worker["worker_id"]: worker for worker in json.loads(body)["workers"]}

    def timeline(self, request_id: str, *, until: str = "decode") -> dict[str, Any]:
        """The request's timeline, once the span `until` has been reported."""
        found: dict[str, Any] = {}

        def has_span() -> bool:
            body = self.get(f"/admin/requests/{request_id}")
            found.update(json.loads(body or "{}"))
            return any(span["name"] == until for span in found.get("spans", []))

        self._wait(has_span, timeout_s=10)
        return found

    def metrics(self, worker_id: str | None = None) -> dict[str, float]:
        """Samples of a worker, or of the coordinator: `name{label="value"}` → value."""
        base = self.workers()[worker_id]["url"] if worker_id else self.url
        body = self.get("/metrics", base)
        assert body is not None, f"{worker_id or 'coordinator'} gives no metrics"
        samples: dict[str, float] = {}
        for family in text_string_to_metric_families(body):
            for sample in family.samples:
                labels = ",".join(f'{k}="{v}"' for k, v in sorted(sample.labels.items()))
                samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return samples

    def wait_until(self, condition: Any, what: str, timeout_s: float = 15.0) -> None:
        try:
            self._wait(condition, timeout_s=timeout_s)
        except TimeoutError:
            raise AssertionError(f"not within {timeout_s:g} s: {what}") from None

    def _start(self, name: str, arguments: list[str]) -> Process:
        log = self.root / f"{name}.log"
        environment = {k: v for k, v in os.environ.items() if not k.startswith("EPD_")}
        ties = ["--token-file", str(self.token_file), "--parent-pid", str(os.getpid())]
        with log.open("ab") as output:
            popen = subprocess.Popen(
                [sys.executable, "-m", "epd", *arguments, *ties],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
        process = self.processes[name] = Process(name, log, popen)
        return process

    def _wait(self, condition: Any, timeout_s: float = START_S) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            for process in self.processes.values():
                if process.popen.poll() not in (None, 0, -signal.SIGKILL):
                    tail = process.log.read_text(errors="replace")[-3000:]
                    raise AssertionError(f"{process.name} ended:\n{tail}")
            if time.monotonic() > deadline_s:
                logs = "\n".join(
                    f"--- {p.name}\n{p.log.read_text(errors='replace')[-1500:]}"
                    for p in self.processes.values()
                )
                raise TimeoutError(f"timed out; logs:\n{logs}")
            time.sleep(0.1)
