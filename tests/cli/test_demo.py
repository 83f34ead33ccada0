"""`epd demo` with real processes: the answer, the timeline, and snippets that work."""

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from epd.engines.torch.tiny import write_random_checkpoint
from tests.cli.deployment import START_S, children_of, is_alive, running, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
STAGES = ("fetch", "encode", "embedding hand-off", "prefill", "KV hand-off", "decode")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "random-vl"
    write_random_checkpoint(path, family="qwen2_5_vl", seed=0)
    return path


def snippet(text: str, start: str, end: str) -> str:
    found = re.search(rf"^{start}.*?(?=^{end}|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None, text
    return found[0]


def test_the_demo_answers_draws_its_timeline_and_keeps_serving_until_ctrl_c(
    model: Path, tmp_path: Path
) -> None:
    output, state = tmp_path / "output", tmp_path / "state"
    arguments = ("demo", "--keep", "--model", str(model), "--seed", "1")
    environ = {"TMPDIR": str(tmp_path), "XDG_STATE_HOME": str(state), "COLUMNS": "100"}
    with running(*arguments, output=output, **environ) as demo:
        until(lambda: "Ctrl-C stops all" in output.read_text(), START_S, "serving")
        text = output.read_text()
        children = children_of(demo.pid)
        assert set(children) == {"coordinator", "encode-0", "prefill-0", "decode-0"}

        curl = snippet(text, "curl ", "\n").strip()
        if shutil.which("curl"):
            done = subprocess.run(
                shlex.split(curl), capture_output=True, text=True, timeout=60, check=True
            )
            assert '"finish_reason"' in done.stdout, done.stdout
        program = snippet(text, "import base64", "See the workers")
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        answer = text.split("\nanswer    ")[1].split("\nexpected  ")[0]
        assert done.stdout.strip() == answer.strip(), "greedy answers are the same each time"

        status = next(line for line in text.splitlines() if " status " in line)
        done = subprocess.run(
            shlex.split(status), capture_output=True, text=True, timeout=60, check=True
        )
        assert all(name in done.stdout for name in ("encode-0", "prefill-0", "decode-0"))

        demo.send_signal(signal.SIGINT)
        assert demo.wait(30) == 0
        assert [name for name, pid in children.items() if is_alive(pid)] == []
    assert not state.exists(), "the user's token must not be made or touched"
    picture = Path(text.split("picture   ")[1].splitlines()[0])
    with Image.open(picture) as image:
        image.load()
    assert "starting: encode 1/1, prefill 1/1, decode 1/1" in text
    assert "\nquestion  " in text
    bars = {line[:18].strip(): line for line in text.splitlines() if "█" in line}
    assert tuple(bars) == STAGES
    assert re.search(r"[\d.]+ (KiB|MiB)$", bars["embedding hand-off"])
    assert re.search(r"[\d.]+ (KiB|MiB)$", bars["KV hand-off"])
    assert re.search(r"\d+ tokens/s$", bars["decode"])
    assert re.search(r"^TTFT [\d.]+ ms, TPOT [\d.]+ ms, E2E [\d.]+ ms$", text, re.MULTILINE)
    assert "\x1b" not in text, "no colours and no picture when piped"


def test_a_demo_that_cannot_start_says_why(model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken-vl"
    shutil.copytree(model, broken)
    config = broken / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "llama"}))
    output = tmp_path / "output"
    environ = {"TMPDIR": str(tmp_path)}
    with running("demo", "--model", str(broken), output=output, **environ) as demo:
        assert demo.wait(START_S) != 0
    lines = output.read_text().splitlines()
    assert lines[-1].startswith("epd: ")
    assert "llama" in lines[-1]
    assert not any("Traceback" in line for line in lines)
