"""Pretends to be `sglang serve`: its flags, its health, its loads, its ways to fail.

How it behaves is read, at each probe, from the JSON file FAKE_SGLANG_BEHAVIOUR:

    exit: leave at once with this code, after printing `words`
    ready: answer /health with 200
    loads: the body of /v1/loads
    silent: accept connections and never answer
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from epd.engines.sglang.environment import PARENT_VARIABLE
from epd.engines.sglang.parent import die_with_parent


def behaviour() -> dict[str, Any]:
    return json.loads(Path(os.environ["FAKE_SGLANG_BEHAVIOUR"]).read_text())


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        now = behaviour()
        while now.get("silent"):
            time.sleep(0.05)
            now = behaviour()
        if self.path == "/health":
            self._answer(200 if now.get("ready", True) else 503, {})
        elif self.path == "/v1/loads":
            self._answer(200, now.get("loads", {"loads": []}))
        else:
            self._answer(404, {})

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


def main() -> None:
    if parent := os.environ.pop(PARENT_VARIABLE, None):
        die_with_parent(int(parent))
    argv = sys.argv[1:]
    now = behaviour()
    print("fake sglang begins:", *argv, flush=True)
    if "exit" in now:
        print(now.get("words", ""), flush=True)
        sys.exit(now["exit"])
    # As SGLang's schedulers do, which would otherwise outlive it.
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    pids = Path(os.environ["FAKE_SGLANG_BEHAVIOUR"]).with_name("pids")
    with pids.open("a") as file:
        file.write(f"{os.getpid()} {child.pid}\n")
    port = int(argv[argv.index("--port") + 1])
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    server.serve_forever()


if __name__ == "__main__":
    main()
