"""A receiving process: one MooncakeEngine over host memory, commanded by lines on stdin.

Prints `session_id address` at start; answers `digest OFFSET NBYTES` with a SHA-256.
"""

import hashlib
import sys

from epd.transfer import HostMemory, MooncakeEngine


def main() -> None:
    memory = HostMemory(int(sys.argv[1]))
    engine = MooncakeEngine("127.0.0.1")
    engine.register(memory.address, memory.nbytes)
    print(engine.session_id, memory.address, flush=True)
    for line in sys.stdin:
        _, offset, nbytes = line.split()
        content = memory.view()[int(offset) : int(offset) + int(nbytes)]
        print(hashlib.sha256(content).hexdigest(), flush=True)


if __name__ == "__main__":
    main()
