#!/usr/bin/env bash
# Makes an environment with SGLang for a CPU: for development and tests, never for production.
# Where there is a GPU, install SGLang as its own documentation says (see docs/gpu.md).
#
#   scripts/setup-sglang.sh VENV     VENV: folder of the environment
#   PYTHON=python3.12                the interpreter to make it from (default: python3)
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${1:?usage: scripts/setup-sglang.sh VENV}
python=${PYTHON:-python3}
sglang=sglang==0.5.23
torch=torch==2.13.0+cpu
torchvision=torchvision==0.28.0
pytorch_index=https://download.pytorch.org/whl/cpu

say() { printf 'setup-sglang: %s\n' "$*"; }
fail() { printf 'setup-sglang: %s\n' "$*" >&2; exit 1; }

recipe=$(cat "$0" scripts/sglang-cpu.txt pyproject.toml | sha256sum | cut -d" " -f1)
if [ "$(cat "$venv/.epd-recipe" 2>/dev/null)" = "$recipe" ]; then
    exit 0
fi

"$python" -c 'import ctypes; ctypes.CDLL("libibverbs.so.1")' 2>/dev/null ||
    fail "Mooncake needs the system library libibverbs; run make setup, which installs it"

[ -x "$venv/bin/pip" ] || "$python" -m venv --clear "$venv" ||
    fail "$python cannot make environments: install its venv package"
# What pip says of SGLang's missing CUDA dependencies is expected here, so errors only.
pip() { nice "$venv/bin/python" -m pip --disable-pip-version-check install --quiet --quiet "$@"; }
from_pytorch() { pip --extra-index-url "$pytorch_index" --retries 2 --timeout 15 "$@"; }

say "installing $torch"
from_pytorch "$torch"
# PyTorch's own index has a torchvision for its CPU build. Without that index PyPI's will do, whose
# compiled operators need CUDA: epd/engines/sglang/cpu declares what then is missing.
say "installing $torchvision"
from_pytorch --no-deps "$torchvision+cpu" 2>/dev/null || pip --no-deps "$torchvision"

say "installing $sglang and what it needs on a CPU (about 2 GB)"
pip --no-deps "$sglang"
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
printf '%s\n' "$torch" "$torchvision" >"$constraints"
pip --constraint "$constraints" --requirement scripts/sglang-cpu.txt
pip --constraint "$constraints" --editable '.' 'pytest>=8.4,<10' 'pytest-asyncio>=1.1,<2' \
    'pytest-timeout>=2.4,<3'

echo "$recipe" >"$venv/.epd-recipe"
say "done: $venv is $(du -sh "$venv" | cut -f1)"
