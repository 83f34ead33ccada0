"""`python -m epd.engines.sglang.serve FLAGS`: `sglang serve FLAGS`, tied to the life of its worker.

The worker starts this and not SGLang's own command for three reasons. The server must not outlive a
worker that was killed (the kernel is asked to see to that); flags are checked by their full names;
and where no CUDA is the stand-ins of `epd.engines.sglang.cpu` must be there before SGLang is
imported. SGLang starts its schedulers with `multiprocessing` spawn, which imports this module again
in each of them: what is done at import here is done in all of its processes.
"""

from __future__ import annotations

import os
import sys

from epd.engines.sglang.cpu import stand_ins
from epd.engines.sglang.environment import EXIT_USAGE, PARENT_VARIABLE
from epd.engines.sglang.flag_check import explain, unknown_flags
from epd.engines.sglang.parent import die_with_parent


def main() -> None:
    """Run SGLang's command in this process."""
    if parent_pid := os.environ.pop(PARENT_VARIABLE, None):
        die_with_parent(int(parent_pid))
    argv = sys.argv[1:]
    if unknown := unknown_flags(argv):
        print(f"epd: {explain(unknown)}", file=sys.stderr)
        sys.exit(EXIT_USAGE)
    from sglang.cli.main import main as sglang_main  # pyright: ignore[reportMissingImports]

    sys.argv = ["sglang", "serve", *argv]
    sglang_main()


stand_ins.install()
if __name__ == "__mp_main__":
    # A process that SGLang spawned. Not all of them ask for this themselves.
    die_with_parent()
if __name__ == "__main__":
    main()
