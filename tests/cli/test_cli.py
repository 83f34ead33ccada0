"""The `epd` command: options, and errors that are one clear line."""

import inspect
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from epd import __version__
from epd.auth import TOKEN_VARIABLE
from epd.cli.coordinator import coordinator
from epd.cli.launch import launch
from epd.config import CoordinatorConfig, WorkerConfig

COMMANDS = ("demo", "up", "coordinator", "launch", "status", "doctor")


def epd(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", **environ}
    env.pop(TOKEN_VARIABLE, None)
    return subprocess.run(
        [sys.executable, "-m", "epd", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=env,
        check=False,
    )


def test_alone_it_prints_its_commands() -> None:
    done = epd()
    assert done.returncode == 2
    assert done.stderr == ""
    assert all(re.search(rf"^\W+{command} ", done.stdout, re.MULTILINE) for command in COMMANDS)


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_every_command_has_a_help_page(command: str) -> None:
    done = epd(*command.split(), "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage:" in done.stdout


def test_the_version_is_the_packages() -> None:
    assert epd("--version").stdout == f"epd {__version__}\n"


@pytest.mark.parametrize(
    ("command", "kind"), [(launch, WorkerConfig), (coordinator, CoordinatorConfig)]
)
def test_a_command_has_an_option_for_each_field_of_its_configuration(
    command: object, kind: type[BaseModel]
) -> None:
    parameters = set(inspect.signature(command).parameters)  # pyright: ignore
    fields = {name for name in kind.model_fields if not _is_set_in_a_file_only(kind, name)}
    assert fields <= parameters
    assert parameters - fields <= {"parent_pid", "config", "flags"}


def _is_set_in_a_file_only(kind: type[BaseModel], name: str) -> bool:
    """Whether a field is a section, or a table of them."""
    hint = kind.model_fields[name].annotation
    return any(
        isinstance(part, type) and issubclass(part, BaseModel) for part in (hint, *get_args(hint))
    )


def test_the_parent_pid_is_not_for_people() -> None:
    assert "parent-pid" not in epd("launch", "--help").stdout


def test_the_defaults_on_the_help_page_are_the_schemas() -> None:
    words = " ".join(re.sub(r"[│\s]+", " ", epd("launch", "--help").stdout).split())
    assert "--kv-bytes" in words
    assert f"(default {WorkerConfig.model_fields['kv_bytes'].default})" in words


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bogus"], "No such command 'bogus'"),
        (["launch", "--stge", "encode"], "No such option: --stge"),
        (["launch", "--stage"], "--stage"),
        (["launch"], "--stage is missing; --model is missing"),
        (["launch", "--stage", "encode"], "--model is missing"),
        (["launch", "--stage", "both", "--model", "m"], "--stage: input should be 'encode'"),
        (["launch", "--stage", "encode", "--model", "nope"], "model 'nope' is neither"),
        (["launch", "--stage", "encode", "--model", "tests"], "tests has no config.json"),
        (
            ["launch", "--stage", "encode", "--model", "tests", "--device", "gpu"],
            "--device: 'gpu' is no device",
        ),
        (["status", "extra"], "unexpected extra argument"),
        (["launch", "--label", "zone"], "--label: 'zone' is no label: give NAME=VALUE"),
        (["coordinator", "--port", "abc"], "--port: input should be a valid integer"),
        (["coordinator", "--port", "0"], "--port: input should be greater than or equal to 1"),
        (["coordinator", "--host", "::1:8000:x"], "--host: '::1:8000:x' is no host"),
        (["status", "--coordinator", "http://::1:8"], "--coordinator: 'http://::1:8' is no URL"),
        (["coordinator", "--port", "70000"], "--port: input should be less than or equal to 65535"),
        (["coordinator", "--host", "10.0.0.7"], "set api_keys_file"),
        (["coordinator", "--config", "nope.yaml"], "nope.yaml: cannot be read"),
        (["coordinator", "--api-keys-file", "nope"], "api_keys_file: nope cannot be read"),
        (["up"], "config"),
        (["up", "nope.yaml"], "nope.yaml: cannot be read"),
        (["up", "pyproject.toml"], "pyproject.toml"),
        (["status", "--token-file", "nope"], "no cluster token: nope cannot be read"),
        (["demo", "--image", "nope.png"], "--image nope.png: No such file"),
        (["demo", "--model", "nope"], "model 'nope' is neither"),
        (["demo", "--seed", "x"], "--seed"),
        (["doctor", "--port", "x"], "--port"),
    ],
)
def test_a_mistake_is_one_clear_line_and_exit_code_2(arguments: list[str], words: str) -> None:
    done = epd(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.startswith("epd: ")
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stdout + done.stderr


def test_a_wrong_key_of_a_pool_is_named_in_full(tmp_path: Path) -> None:
    path = tmp_path / "d.yaml"
    path.write_text("pools: {encode: {worker: {kv_byte: 1}}}")
    done = epd("up", str(path))
    assert done.returncode == 2
    assert done.stderr == (
        f"epd: {path}: unknown key pools.encode.worker.kv_byte; did you mean kv_bytes?\n"
    )


def test_a_port_in_use_is_one_clear_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        done = epd("coordinator", "--port", port, "--token-file", str(tmp_path / "token"))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"epd: cannot listen on 127.0.0.1:{port}: ")
    assert "Traceback" not in done.stderr


def test_a_coordinator_that_is_not_there_is_a_failure_at_run_time(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a" * 32)
    token.chmod(0o600)
    done = epd("status", "--coordinator", "http://127.0.0.1:1", "--token-file", str(token))
    assert done.returncode == 1
    assert done.stderr.startswith("epd: no coordinator can be reached at http://127.0.0.1:1")
    assert done.stderr.count("\n") == 1


def test_the_coordinator_and_the_help_pages_do_not_import_torch() -> None:
    text = (
        "import sys, epd.cli.main, epd.api.server, epd.pools.local, epd.doctor\n"
        "epd.cli.main.build_app()\n"
        "heavy = {'torch', 'transformers', 'mooncake', 'sglang', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_doctor_speaks_json_too(tmp_path: Path) -> None:
    done = epd("doctor", "--json", XDG_STATE_HOME=str(tmp_path))
    report = json.loads(done.stdout)
    assert (done.returncode, report["ok"]) == (0, True)
    assert {"name", "verdict", "detail", "what_to_do"} == set(report["checks"][0])


def test_the_doctor_prints_one_line_for_each_check(tmp_path: Path) -> None:
    done = epd("doctor", XDG_STATE_HOME=str(tmp_path))
    lines = [line for line in done.stdout.splitlines() if "→" not in line]
    assert len(lines) == 11
    assert all(re.match(r"(ok|not present|warning)  ", line) for line in lines), done.stdout
