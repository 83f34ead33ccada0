"""Commands that ask the same question again, for whoever keeps the demo running."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from epd.demo.question import Question


def curl_snippet(url: str, request_file: Path) -> str:
    """A command that sends a prepared request and prints the answer."""
    return (
        f"curl -s {url}/v1/chat/completions -H 'Content-Type: application/json' "
        f"-d @{shlex.quote(str(request_file))}"
    )


def status_snippet(url: str, token_file: Path) -> str:
    """A command that shows the workers; the demo has a cluster token of its own."""
    return shlex.join(
        [
            sys.executable,
            "-m",
            "epd",
            "status",
            f"--coordinator={url}",
            f"--token-file={token_file}",
        ]
    )


def openai_snippet(url: str, model: str, question: Question, pictures: Sequence[Path]) -> str:
    """A program for OpenAI's Python client that streams the answer."""
    files = [str(path) for path in pictures]
    mime = question.pictures[0].mime
    return f"""\
import base64
from openai import OpenAI

client = OpenAI(base_url={json.dumps(f"{url}/v1")}, api_key="none")
content = []
for file in {json.dumps(files)}:
    picture = base64.b64encode(open(file, "rb").read()).decode()
    url = f"data:{mime};base64,{{picture}}"
    content.append({{"type": "image_url", "image_url": {{"url": url}}}})
content.append({{"type": "text", "text": {json.dumps(question.text)}}})
stream = client.chat.completions.create(
    model={json.dumps(model)},
    messages=[{{"role": "user", "content": content}}],
    max_tokens=64,
    temperature=0,
    stream=True,
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
"""
