"""README and docs name only what exists: files, links, make targets, commands and options."""

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from epd.config.load import load_deployment

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = ("epd", "encoders", "examples", "tests", "docs", "configs", "scripts", ".ci")


def ids(path: Path) -> str:
    return path.name


@cache
def help_page(command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "epd", *command.split(), "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"COLUMNS": "200", "NO_COLOR": "1", "PATH": "/usr/bin:/bin"},
        cwd=ROOT,
    )
    assert done.returncode == 0, f"epd {command}: {done.stderr}"
    return done.stdout


def commands(text: str) -> list[tuple[str, str]]:
    """(command, rest of the line) of each `epd ...` in code."""
    spans = re.findall(r"`([^`\n]+)`", text)
    blocks = re.findall(r"```.*?```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.split("\n")]
    found = [re.match(r"(?:\$ )?epd (\S+)(.*)", code) for code in spans + lines]
    return [(m[1], m[2].split("#")[0]) for m in found if m and m[1] != "COMMAND"]


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_link_leads_to_a_file(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    for link in links:
        if not link.startswith(("http://", "https://")):
            assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_path_in_code_exists(page: Path) -> None:
    for code in re.findall(r"`([\w./-]+)`", page.read_text()):
        if code.split("/")[0] in FOLDERS and "/" in code:
            assert (ROOT / code).exists(), code


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_make_target_exists(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for target in re.findall(r"(?:`|\$ )make ([\w-]+)", page.read_text()):
        assert target in targets, target


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_command_and_option_exists(page: Path) -> None:
    for command, rest in commands(page.read_text()):
        options = re.findall(r"(?<!\S)--[\w-]+", rest.split(" -- ")[0])
        text = help_page(command)
        for option in options:
            assert re.search(rf"{option}\b(?!-)", text) or option == "--help", (command, option)


def test_each_command_is_documented_with_its_own_options() -> None:
    sections = re.split(r"^## `epd (\w+).*`$", (ROOT / "docs" / "cli.md").read_text(), flags=re.M)
    documented = dict(zip(sections[1::2], sections[2::2], strict=True))
    listed = re.findall(r"^│ (\w+) ", help_page("").split("Commands")[1], re.MULTILINE)
    assert sorted(documented) == sorted(listed)
    for command, text in documented.items():
        for option in re.findall(r"`(--[\w-]+)`", text):
            assert re.search(rf"{option}\b(?!-)", help_page(command)), (command, option)


def test_the_files_named_for_epd_up_can_be_read() -> None:
    files = {
        rest.split()[0]
        for page in PAGES
        for command, rest in commands(page.read_text())
        if command == "up" and rest.split() and rest.split()[0] != "FILE"
    }
    assert files
    for file in files:
        load_deployment(ROOT / file)


def test_the_documented_http_paths_are_served() -> None:
    sources = "\n".join(
        path.read_text()
        for folder in ("epd/api", "epd/engines/shell", "epd/engines/torch")
        for path in (ROOT / folder).glob("*.py")
    )
    paths = re.findall(r"`(?:GET|POST|PUT) (/[^`]*)`", (ROOT / "docs" / "contract.md").read_text())
    assert len(paths) > 15
    for path in paths:
        start = re.escape(path).replace(r"\{", "{").replace(r"\}", "}")
        pattern = re.sub(r"\{(\w+)\}", r"\\{\1(:[^}]*)?\\}", start)
        assert re.search(rf'"{pattern}"', sources), path


def test_ci_runs_what_the_readme_tells() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    readme = (ROOT / "README.md").read_text()
    for target in ("demo", "test"):
        assert f"$ make {target} " in readme
    for target in ("demo", "check"):
        assert re.search(rf"^make {target}$", script, re.MULTILINE)
    assert re.search(r"^check: lint test\b", (ROOT / "Makefile").read_text(), re.MULTILINE)
