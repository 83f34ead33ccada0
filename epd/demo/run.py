"""The demo from start to end: deployment, question, answer, timeline."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from epd.checkpoints import bundled_names, resolve
from epd.demo.ask import ask
from epd.demo.preview import show_picture
from epd.demo.question import Question, make_question
from epd.demo.snippets import curl_snippet, openai_snippet, status_snippet
from epd.demo.timeline import Timeline
from epd.pools.local import Readiness
from epd.pools.local.temporary import TemporaryDeployment, temporary_deployment
from epd.sdk import AdminClient, RequestTimeline

BUNDLED_MODEL = "tiny-vl"
_RANDOM_MODEL = "random-vl"
_SPANS_S = 3.0
_MAX_TOKENS = 64


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

    The run's folder outlives it: the pictures and the logs are there.

    Args:
        options: the user's choice.
        console: gets the question, the answer and the timeline.
        progress: gets how far the start is.

    Raises:
        EPDError: the deployment did not start, or did not answer.
    """
    question = make_question(options.image, options.question, options.seed)
    trained = _trained_model(options.model)
    folder = Path(tempfile.mkdtemp(prefix="epd-demo-"))
    if trained is None:
        # Its answer is noise, so an expected one beside it would mislead.
        question = dataclasses.replace(question, expected=None)
    model = trained or _random_model(folder, console)
    status = progress.status("starting")

    def show(readiness: Readiness) -> None:
        status.update(f"starting: {readiness}")
        if not progress.is_terminal:
            progress.print(f"starting: {readiness}", highlight=False)

    try:
        status.start()
        async with temporary_deployment(model, folder, show) as deployment:
            status.stop()
            demo = _Demo(deployment, question, model.name, folder, console)
            await deployment.supervisor.guard(demo.ask())
            if options.keep:
                demo.show_snippets()
                await deployment.supervisor.until_stopped(asyncio.Event().wait())
            status.update("stopping")
            status.start()
    finally:
        status.stop()


def _trained_model(wanted: str | None) -> Path | None:
    """The checkpoint to serve; None if the user names none and none is bundled."""
    if wanted is None and BUNDLED_MODEL not in bundled_names():
        return None
    return resolve(wanted or BUNDLED_MODEL)


def _random_model(folder: Path, console: Console) -> Path:
    from epd.engines.torch.tiny import write_random_checkpoint

    console.print("No trained model is bundled: the weights are random and the answer is noise.")
    path = folder / _RANDOM_MODEL
    write_random_checkpoint(path, family="qwen2_5_vl", seed=0)
    return path


@dataclass(frozen=True, slots=True)
class _Demo:
    deployment: TemporaryDeployment
    question: Question
    model: str
    folder: Path
    console: Console

    async def ask(self) -> None:
        """Show the pictures and the question, then the answer as it comes and its timeline."""
        console = self.console
        for picture in self.question.pictures:
            path = self.folder / picture.name
            path.write_bytes(picture.data)
            console.print(f"picture   {path}", soft_wrap=True, markup=False, highlight=False)
            show_picture(console, picture.data, os.environ)
        self._print(f"question  {self.question.text}")
        self._print("answer    ", end="")
        body = self.question.chat_request(self.model, max_tokens=_MAX_TOKENS, stream=True)
        request_id, _ = await ask(self.deployment.url, body, lambda text: self._print(text, end=""))
        self._print("")
        if self.question.expected is not None:
            self._print(f"expected  {self.question.expected}")
        console.print()
        console.print(Timeline(await _timeline(self.deployment.admin, request_id)))

    def show_snippets(self) -> None:
        """Print commands that ask the same again."""
        url = self.deployment.url
        pictures = [self.folder / picture.name for picture in self.question.pictures]
        request_file = self.folder / "request.json"
        body = self.question.chat_request(self.model, max_tokens=_MAX_TOKENS, stream=False)
        request_file.write_text(json.dumps(body))
        self._print(f"\nStill serving at {url}/v1. Ask again with curl:\n")
        self._print(curl_snippet(url, request_file))
        self._print("\nor in Python (pip install openai):\n")
        self._print(openai_snippet(url, self.model, self.question, pictures))
        self._print("See the workers with:\n")
        self._print(status_snippet(url, self.deployment.token_file))
        self._print("\nCtrl-C stops all.")

    def _print(self, text: str, *, end: str = "\n") -> None:
        self.console.print(text, end=end, markup=False, highlight=False, soft_wrap=True)


async def _timeline(admin: AdminClient, request_id: str) -> RequestTimeline:
    """The request's record, once the workers have reported their last spans."""
    deadline_s = asyncio.get_running_loop().time() + _SPANS_S
    while True:
        record = await admin.request(request_id)
        is_whole = any(span.name == "decode" for span in record.spans)
        if is_whole or asyncio.get_running_loop().time() > deadline_s:
            return record
        await asyncio.sleep(0.05)
