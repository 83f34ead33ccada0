"""Checks flags against the installed SGLang's own parser, inside the process that imports SGLang.

An upgrade that renames a flag then fails at once with the flag's name, and not with an abbreviation
that means another flag or a server in another role.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from epd.engines.sglang.cpu import stand_ins


def unknown_flags(argv: Sequence[str]) -> list[str]:
    """The words of `argv` that SGLang's parser does not know; a wrong value leaves with code 2."""
    from sglang.srt.server_args import ServerArgs  # pyright: ignore[reportMissingImports]

    # SGLang's own parser takes any unambiguous beginning of a flag for the flag.
    parser = argparse.ArgumentParser(prog="sglang serve", allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    return parser.parse_known_args(list(argv))[1]


def explain(unknown: Sequence[str]) -> str:
    """The sentence for flags that are not known."""
    from sglang.version import __version__  # pyright: ignore[reportMissingImports]

    return f"SGLang {__version__} has no flag {' '.join(unknown)}"


def main() -> None:
    """Read a JSON list of argument lists from standard input; print the unknown flags of each."""
    print(json.dumps([unknown_flags(argv) for argv in json.load(sys.stdin)]))


if __name__ == "__main__":
    stand_ins.install()
    main()
