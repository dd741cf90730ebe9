"""A small OpenAI-compatible server, run as a script, that answers well or badly in one chosen way.

    python odd_peer.py PORT MODE [FILE]

MODE: good; joined (two tokens a chunk); loading (503 at first); refuse (400 for real requests); short (ends early, and
says so); no-usage; long-prompt (counts one token too many); error (an error event); cut (no [DONE]); silent (stops in
the middle); die (the process ends in the middle); never-ready (503 for ever); no-model; stubborn (ignores SIGTERM, and
has a child that does too, whose process id is written to FILE).
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

PORT, MODE = int(sys.argv[1]), sys.argv[2]
STARTED = time.monotonic()
WARM_UP_TOKENS = 8  # shorter requests are answered well in every mode, so that the server becomes ready


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        if MODE == "never-ready" or (MODE == "loading" and time.monotonic() < STARTED + 1):
            self._json(503, {"error": {"message": "loading"}})
        elif self.path == "/v1/models":
            self._json(200, {"data": [] if MODE == "no-model" else [{"id": "odd"}]})
        elif self.path == "/version":
            self._json(200, {"version": "1.2.3"})
        else:
            self._json(404, {"error": {"message": "unknown path"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["temperature"] == 0
        assert body["ignore_eos"] is True
        if not body.get("stream"):
            self._json(200, {"choices": [{"text": "x"}], "usage": {"completion_tokens": 1}})
            return
        mode = MODE if body["max_tokens"] > WARM_UP_TOKENS else "good"
        if mode == "refuse":
            self._json(400, {"error": {"message": "not today"}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self._stream(mode, len(body["prompt"]), body["max_tokens"])

    def _stream(self, mode: str, prompt_tokens: int, max_tokens: int) -> None:
        count = max_tokens - 3 if mode == "short" else max_tokens
        for index in range(0, count, 2 if mode == "joined" else 1):
            if index == 2 and mode == "silent":
                time.sleep(60)
            if index == 2 and mode == "die":
                sys.stderr.write("out of luck\n")
                sys.stderr.flush()
                os._exit(7)
            if index == 2 and mode == "error":
                self._event({"error": {"message": "engine fell over"}})
                return
            if index == 2 and mode == "cut":
                return
            self._event({"choices": [{"text": "word " * min(2 if mode == "joined" else 1, count - index)}]})
            time.sleep(0.002)
        if mode != "no-usage":
            extra = 1 if mode == "long-prompt" else 0
            usage = {"prompt_tokens": prompt_tokens + extra, "completion_tokens": count}
            self._event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, value: Any) -> None:
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")

    def _json(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


if __name__ == "__main__":
    if MODE == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # inherited by the child
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        Path(sys.argv[3]).write_text(str(child.pid))
    ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
