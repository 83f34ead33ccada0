"""Each check of `epd doctor`, on machines that are well and on machines that are not."""

import resource
import socket
import stat
import sys
import textwrap
from pathlib import Path

import pytest

from epd.auth import TOKEN_VARIABLE, load_token
from epd.doctor import Verdict, diagnose
from epd.doctor.hardware import check_gpu, check_locked_memory, check_rdma
from epd.doctor.network import check_advertise, check_port
from epd.doctor.secret import check_token
from epd.doctor.software import check_base_packages, check_python, check_torch_packages
from epd.doctor.transfer import check_libibverbs, check_self_transfer


@pytest.fixture(autouse=True)
def _no_token_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def program(text: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(text)]


def executable(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_an_old_python_is_a_problem() -> None:
    assert check_python((3, 10)).verdict is Verdict.PROBLEM
    assert check_python((3, 10)).what_to_do == "install Python 3.11 or later"
    assert check_python().verdict is Verdict.OK


def test_a_missing_package_is_named_with_the_command_that_brings_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert check_base_packages().verdict is Verdict.OK
    monkeypatch.setattr("epd.doctor.software.find_spec", lambda name: None)
    check = check_torch_packages()
    assert check.verdict is Verdict.PROBLEM
    assert "torch" in check.detail and "transformers" in check.detail
    assert "pip install -e '.[torch]'" in check.what_to_do


def test_a_missing_libibverbs_is_a_problem_with_the_exact_command() -> None:
    check = check_libibverbs("libnosuchthing.so.1")
    assert check.verdict is Verdict.PROBLEM
    assert "apt-get install libibverbs1" in check.what_to_do


def test_mooncake_moves_bytes_from_engine_to_engine() -> None:
    check = check_self_transfer()
    assert check.verdict is Verdict.OK, check.detail
    assert "4 MiB" in check.detail


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
        ("import time; time.sleep(60)", "did not end within 1 s"),
        ("import sys; sys.exit('Mooncake is not installed')", "Mooncake is not installed"),
        ("raise SystemExit(1)", ""),
    ],
)
def test_a_mooncake_that_crashes_hangs_or_is_missing_is_a_problem_that_is_told(
    text: str, detail: str
) -> None:
    check = check_self_transfer(program(text), deadline_s=1)
    assert check.verdict is Verdict.PROBLEM
    assert detail in check.detail
    assert check.what_to_do


def test_a_port_in_use_is_a_warning() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        check = check_port("127.0.0.1", port)
    assert check.verdict is Verdict.WARNING
    assert f"127.0.0.1:{port}: Address already in use" in check.detail
    assert "another --port" in check.what_to_do
    assert check_port("127.0.0.1", port).verdict is Verdict.OK


def test_a_name_that_resolves_to_loopback_is_a_warning_with_the_address_to_give() -> None:
    check = check_advertise("localhost", {"eth0": "10.0.0.7", "ib0": "10.1.0.7"})
    assert check.verdict is Verdict.WARNING
    assert "10.0.0.7 (eth0), 10.1.0.7 (ib0)" in check.detail
    assert check.what_to_do == "for workers on other machines give --advertise 10.0.0.7"


def test_a_name_that_does_not_resolve_is_a_warning() -> None:
    check = check_advertise("nosuchhost.invalid", {"eth0": "10.0.0.7"})
    assert check.verdict is Verdict.WARNING
    assert "does not resolve" in check.detail


def test_a_machine_without_a_network_is_well() -> None:
    assert check_advertise("localhost", {}).verdict is Verdict.OK


def test_a_name_that_others_can_reach_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.0.0.7")
    assert check_advertise("gpu-1", {"eth0": "10.0.0.7"}).verdict is Verdict.OK


def test_no_gpu_and_no_rdma_are_not_present_rather_than_problems(tmp_path: Path) -> None:
    assert check_gpu("no-such-smi").verdict is Verdict.ABSENT
    assert check_rdma(tmp_path / "infiniband").verdict is Verdict.ABSENT


def test_rdma_devices_are_listed(tmp_path: Path) -> None:
    for name in ("mlx5_1", "mlx5_0"):
        (tmp_path / name).mkdir()
    check = check_rdma(tmp_path)
    assert check.verdict is Verdict.OK
    assert check.detail.startswith("mlx5_0, mlx5_1")


def test_a_gpu_that_the_installed_torch_cannot_use_is_a_warning(tmp_path: Path) -> None:
    smi = executable(tmp_path / "smi", "echo 'NVIDIA H200, 143771 MiB'")
    check = check_gpu(smi)
    if check.verdict is Verdict.OK:  # this machine has a GPU and a CUDA build of torch
        assert "NVIDIA H200" in check.detail
    else:
        assert check.verdict is Verdict.WARNING
        assert "cannot use it" in check.detail
        assert "CUDA build of torch" in check.what_to_do


def test_a_driver_that_fails_is_a_warning(tmp_path: Path) -> None:
    smi = executable(tmp_path / "smi", "echo 'driver not loaded' >&2; exit 9")
    check = check_gpu(smi)
    assert (check.verdict, check.what_to_do) == (
        Verdict.WARNING,
        "see whether the driver is loaded",
    )


def test_locked_memory_matters_to_rdma_only() -> None:
    assert check_locked_memory(has_rdma=False, limit_bytes=2**16).verdict is Verdict.OK
    limited = check_locked_memory(has_rdma=True, limit_bytes=8 * 2**20)
    assert (limited.verdict, limited.detail) == (Verdict.WARNING, "limit 8 MiB")
    unlimited = check_locked_memory(has_rdma=True, limit_bytes=resource.RLIM_INFINITY)
    assert unlimited.verdict is Verdict.OK


def test_a_token_that_is_not_there_yet_is_no_problem(tmp_path: Path) -> None:
    assert check_token(tmp_path / "token").verdict is Verdict.ABSENT
    assert check_token().verdict is Verdict.ABSENT


def test_a_user_without_a_home_folder_gets_a_line_of_doctor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    check = check_token()
    assert check.verdict is Verdict.WARNING
    assert "no home folder" in check.detail


def test_a_token_is_checked_without_being_shown(tmp_path: Path) -> None:
    path = tmp_path / "token"
    secret = load_token(path, create=True).headers["Authorization"].split()[1]
    check = check_token(path)
    assert check.verdict is Verdict.OK
    assert secret not in str(check)
    path.chmod(0o644)
    assert check_token(path).verdict is Verdict.WARNING
    assert "chmod 600" in check_token(path).detail


def test_a_weak_token_in_the_environment_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "short")
    assert check_token().verdict is Verdict.WARNING


def test_the_report_has_one_line_for_each_check_and_no_problem_here() -> None:
    checks = list(diagnose(host="127.0.0.1", port=0, token_file=None))
    names = [check.name for check in checks]
    assert len(set(names)) == len(names) == 11
    assert [check for check in checks if check.verdict is Verdict.PROBLEM] == []
    for check in checks:
        needs_work = check.verdict in (Verdict.WARNING, Verdict.PROBLEM)
        assert not needs_work or check.what_to_do
