"""scripts/setup.sh on machines that lack something, with stand-ins for the system's commands."""

import shutil
import subprocess
from pathlib import Path

import pytest

SETUP = Path(__file__).parents[1] / "scripts" / "setup.sh"
PYTHON_WITHOUT_LIBRARY = """\
case "$*" in
    *version_info*) exit 0 ;;
    *ctypes*) [ -e "$(dirname "$0")/libibverbs" ] ;;
    --version) echo "Python 3.11.0" ;;
    *) echo "python $*" >> "$(dirname "$0")/calls"; exit 9 ;;
esac
"""


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A folder of commands that come before the system's own."""
    add(tmp_path, "python3", PYTHON_WITHOUT_LIBRARY)
    add(tmp_path, "uname", "echo Linux")
    return tmp_path


def add(machine: Path, name: str, text: str) -> None:
    path = machine / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def setup(machine: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": f"{machine}:/usr/bin:/bin", "HOME": str(machine), **environ}
    return subprocess.run(
        [str(SETUP), str(machine / "venv")],
        capture_output=True,
        text=True,
        timeout=30,
        env=env,
        check=False,
    )


@pytest.mark.skipif(shutil.which("dnf") is not None, reason="this machine's packages are rpms")
def test_without_root_a_missing_library_is_one_sentence_with_the_exact_command(
    machine: Path,
) -> None:
    add(machine, "id", "echo 1000")
    done = setup(machine)
    assert done.returncode == 1
    assert done.stderr == (
        "setup: Mooncake needs the system library libibverbs; "
        "run: sudo apt-get install libibverbs1\n"
    )
    assert not (machine / "venv").exists()


def test_where_packages_are_rpms_the_command_is_theirs(machine: Path) -> None:
    add(machine, "id", "echo 1000")
    add(machine, "dnf", "exit 1")
    assert "run: sudo dnf install libibverbs\n" in setup(machine).stderr


def test_as_root_the_library_is_installed(machine: Path) -> None:
    add(machine, "id", "echo 0")
    add(machine, "apt-get", 'echo "apt-get $*" >> "$(dirname "$0")/calls"')
    setup(machine)
    calls = (machine / "calls").read_text().splitlines()
    assert calls[:2] == ["apt-get update -qq", "apt-get install -y -qq libibverbs1"]
    assert any("-m venv" in call for call in calls), "and then it goes on"


def test_a_python_that_cannot_make_environments_says_what_to_install(machine: Path) -> None:
    (machine / "libibverbs").touch()
    add(machine, "id", "echo 1000")
    done = setup(machine)
    assert done.returncode == 1
    assert done.stderr == (
        "setup: python cannot make environments; run: sudo apt-get install python3-venv\n"
    )


def test_an_old_python_is_refused_and_another_can_be_named(machine: Path) -> None:
    for name in ("python3", "python3.11", "python3.12", "python3.13"):
        add(machine, name, "exit 1")
    done = setup(machine)
    assert done.returncode == 1
    assert "no Python 3.11 or later found (set PYTHON=/path/to/python3)" in done.stderr
    add(machine, "id", "echo 1000")
    add(machine, "my-python", PYTHON_WITHOUT_LIBRARY)
    assert "libibverbs" in setup(machine, PYTHON=str(machine / "my-python")).stderr


def test_other_systems_than_linux_are_told_at_once(machine: Path) -> None:
    add(machine, "uname", "echo Darwin")
    done = setup(machine)
    assert done.returncode == 1
    assert "EPD's workers run on Linux only: Mooncake has no build for Darwin" in done.stderr
