"""The demo from start to end: deployment, question, answer, timeline."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml
from rich.console import Console

from epd.auth import load_token
from epd.checkpoints import bundled_names, resolve
from epd.config import DeploymentConfig, load_deployment
from epd.demo.ask import ask
from epd.demo.preview import show_picture
from epd.demo.question import Question, make_question
from epd.demo.snippets import curl_snippet, openai_snippet
from epd.demo.timeline import Timeline
from epd.errors import DeadlineError
from epd.pools.local import (
    FileLog,
    Readiness,
    Supervisor,
    deployment_children,
    free_port,
    watch_until_ready,
)
from epd.sdk import AdminClient, RequestTimeline

BUNDLED_MODEL = "tiny-vl"
_RANDOM_MODEL = "random-vl"
_START_S = 180.0
_SPANS_S = 3.0
_MAX_TOKENS = 64
_MAX_CRASHES = 2
_TUNING = {"threads": 1, "kv_bytes": 64 * 2**20, "embedding_bytes": 64 * 2**20, "drain_s": 5.0}


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the user may choose."""

    model: str | None = None
    image: Path | None = None
    question: str | None = None
    seed: int = 0
    keep: bool = False


async def run_demo(options: DemoOptions, console: Console, progress: Console) -> None:
    """Start 1E1P1D on free ports, ask, show, and stop it all.

    The run's folder holds its own cluster token; the user's is never touched. It is kept: the
    picture and the logs are in it.

    Args:
        options: the user's choice.
        console: gets the question, the answer and the timeline.
        progress: gets how far the start is.

    Raises:
        EPDError: the deployment did not start, or did not answer.
    """
    question = make_question(options.image, options.question, options.seed)
    folder = Path(tempfile.mkdtemp(prefix="epd-demo-"))
    model = _model(options.model, folder, console)
    config_file = _write_config(folder, model)
    deployment = load_deployment(config_file)
    settings = deployment.coordinator
    token = load_token(settings.token_file, create=True)
    coordinator, workers = deployment_children(
        deployment, config_file, FileLog(folder / "logs"), max_crashes=_MAX_CRASHES
    )
    async with (
        Supervisor(coordinator, workers, drain_s=10.0) as supervisor,
        AdminClient(settings.url, token) as admin,
    ):
        with progress.status("starting") as status:

            def show(readiness: Readiness) -> None:
                status.update(f"starting: {readiness}")
                if not progress.is_terminal:
                    progress.print(f"starting: {readiness}", highlight=False)

            await supervisor.guard(_until_ready(admin, deployment, show, folder / "logs"))
        await supervisor.guard(_ask_and_show(settings.url, question, model, folder, admin, console))
        if options.keep:
            _show_snippets(settings.url, question, model, folder, console)
            await supervisor.until_stopped(asyncio.Event().wait())


def _model(wanted: str | None, folder: Path, console: Console) -> Path:
    """The checkpoint to serve; one of random weights, made here, if none is bundled."""
    if wanted is not None or BUNDLED_MODEL in bundled_names():
        return resolve(wanted or BUNDLED_MODEL)
    from epd.engines.torch.tiny import write_random_checkpoint

    console.print("No trained model is bundled: the weights are random and the answer is noise.")
    path = folder / _RANDOM_MODEL
    write_random_checkpoint(path, family="qwen2_5_vl", seed=0)
    return path


def _write_config(folder: Path, model: Path) -> Path:
    document = {
        "model": str(model),
        "coordinator": {"port": free_port(), "token_file": str(folder / "cluster-token")},
        "pools": {stage: {"worker": _TUNING} for stage in ("encode", "prefill", "decode")},
    }
    path = folder / "deployment.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


async def _until_ready(
    admin: AdminClient,
    deployment: DeploymentConfig,
    show: Callable[[Readiness], None],
    logs: Path,
) -> None:
    try:
        async with asyncio.timeout(_START_S):
            await watch_until_ready(admin, deployment.pools, show)
    except TimeoutError as exc:
        raise DeadlineError(f"not ready after {_START_S:.0f} s; see the logs in {logs}") from exc


async def _ask_and_show(
    url: str, question: Question, model: Path, folder: Path, admin: AdminClient, console: Console
) -> None:
    for picture in question.pictures:
        path = folder / picture.name
        path.write_bytes(picture.data)
        console.print(f"picture   {path}", soft_wrap=True, highlight=False)
        show_picture(console, picture.data, os.environ)
    console.print(f"question  {question.text}", markup=False, highlight=False)
    console.print("answer    ", end="")

    def stream(piece: str) -> None:
        console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)

    body = question.chat_request(model.name, max_tokens=_MAX_TOKENS, stream=True)
    request_id, _ = await ask(url, body, stream)
    console.print()
    if question.expected is not None:
        console.print(f"expected  {question.expected}", markup=False, highlight=False)
    console.print()
    console.print(Timeline(await _timeline(admin, request_id)))


async def _timeline(admin: AdminClient, request_id: str) -> RequestTimeline:
    """The request's record, once the workers have reported their last spans."""
    deadline_s = asyncio.get_running_loop().time() + _SPANS_S
    while True:
        record = await admin.request(request_id)
        is_whole = any(span.name == "decode" for span in record.spans)
        if is_whole or asyncio.get_running_loop().time() > deadline_s:
            return record
        await asyncio.sleep(0.05)


def _show_snippets(
    url: str, question: Question, model: Path, folder: Path, console: Console
) -> None:
    request_file = folder / "request.json"
    body = question.chat_request(model.name, max_tokens=_MAX_TOKENS, stream=False)
    request_file.write_text(json.dumps(body))
    picture = folder / question.pictures[0].name
    program = openai_snippet(url, model.name, question, picture)
    console.print(f"\nStill serving at {url}/v1. Ask again with curl:\n", highlight=False)
    console.print(curl_snippet(url, request_file), soft_wrap=True, markup=False, highlight=False)
    console.print("\nor in Python (pip install openai):\n")
    console.print(program, soft_wrap=True, markup=False, highlight=False)
    console.print("Ctrl-C stops all.")
