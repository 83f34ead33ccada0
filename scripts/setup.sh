#!/usr/bin/env bash
# Makes the virtual environment that the Makefile's targets run in; does nothing that is done.
#
#   scripts/setup.sh VENV      VENV: folder of the environment
#   PYTHON=python3.12          the interpreter to make it from (default: the first that will do)
#   TORCH=torch                what to install as torch (default: a pinned CPU build)
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${1:?usage: scripts/setup.sh VENV}

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

as_root_with_apt() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }

apt_install() {
    say "installing the system package $1"
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$1" >/dev/null
}

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if is_new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or later found (set PYTHON=/path/to/python3)"
}

python=$(find_python)

# Mooncake, which carries embeddings and KV between workers, links libibverbs even for TCP.
if [ "$(uname -s)" != Linux ]; then
    fail "EPD's workers run on Linux only: Mooncake has no build for $(uname -s)"
fi
if ! "$python" -c 'import ctypes; ctypes.CDLL("libibverbs.so.1")' 2>/dev/null; then
    if as_root_with_apt; then
        apt_install libibverbs1
    elif command -v dnf >/dev/null; then
        fail "Mooncake needs the system library libibverbs; run: sudo dnf install libibverbs"
    else
        fail "Mooncake needs the system library libibverbs; run: sudo apt-get install libibverbs1"
    fi
fi

if [ ! -x "$venv/bin/pip" ]; then
    say "making $venv with $("$python" --version)"
    if ! "$python" -m venv --clear "$venv" 2>/dev/null; then
        # Debian and Ubuntu ship Python without the module that puts pip into an environment.
        package="$(basename "$(readlink -f "$(command -v "$python")")")-venv"
        as_root_with_apt || fail "python cannot make environments; run: sudo apt-get install $package"
        apt_install "$package"
        "$python" -m venv --clear "$venv"
    fi
fi
pip() { "$venv/bin/python" -m pip --disable-pip-version-check install --quiet "$@"; }

# torch first and alone, as the CPU build: from PyPI the same version comes with gigabytes of CUDA.
# The +cpu in the version makes pip take the CPU build or say that there is none, never the other.
# The builds are on PyTorch's own index, asked beside the configured ones, so that a machine that
# has the wheel locally and cannot reach that index works too (pip warns and goes on).
torch=${TORCH:-torch==2.13.0+cpu}
if ! "$venv/bin/python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' 2>/dev/null; then
    say "installing $torch (the CPU build is a download of about 190 MB)"
    pip --no-deps --extra-index-url https://download.pytorch.org/whl/cpu \
        --retries 2 --timeout 15 "$torch"
fi

say "installing EPD and what it needs"
pip --editable '.[torch,dev]'
touch "$venv/.epd-ready"
say "done"
