"""A scripted OpenAI-compatible server: it answers from a function of the prompt and reports made-up tiers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """One scripted answer: tokens with the alternatives at each place, and the tiers of the prompt."""

    tokens: tuple[str, ...]
    prompt_tokens: int = 1200
    cached: tuple[int, int, int] = (0, 0, 0)
    runner_up: tuple[str, float] = ("zz", -3.0)
    finish: bool = True
    usage: bool = True
    status: int = 200

    def chunks(self) -> Iterator[Body]:
        """The stream's records."""
        yield {
            "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]
        }
        name, gap = self.runner_up
        for token in self.tokens:
            top = [_likely(token, -0.5), _likely(name, -0.5 + gap)]
            content = [{**_likely(token, -0.5), "top_logprobs": top}]
            yield {"choices": [{"index": 0, "delta": {"content": token}, "logprobs": {"content": content}}]}
        if self.finish:
            yield {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
        if self.usage:
            device, host, storage = self.cached
            yield {
                "choices": [],
                "usage": {
                    "prompt_tokens": self.prompt_tokens,
                    "completion_tokens": len(self.tokens),
                    "prompt_tokens_details": {"cached_tokens": device + host + storage},
                    "cached_tokens_details": {"device": device, "host": host, "storage": storage},
                },
            }


def _likely(token: str, logprob: float) -> Body:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}


@dataclass
class Seen:
    """What the server was asked, and how many requests ran at the same time."""

    bodies: list[Body] = field(default_factory=list)
    num_running: int = 0
    most_running: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def fake_server(answer: Callable[[Body], Reply]) -> Iterator[tuple[str, Seen]]:
    """The URL of a running server and what it has seen."""
    seen = Seen()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            """Print nothing."""

        def do_GET(self) -> None:
            self._send(200, "application/json", json.dumps({"data": [{"id": "fake"}]}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with seen.lock:
                seen.bodies.append(body)
                seen.num_running += 1
                seen.most_running = max(seen.most_running, seen.num_running)
            reply = answer(body)
            lines = [f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n" for chunk in reply.chunks()]
            with seen.lock:
                seen.num_running -= 1
            if reply.status != 200:
                self._send(reply.status, "application/json", b'{"error": "scripted"}')
                return
            self._send(200, "text/event-stream", "".join([*lines, "data: [DONE]\n\n"]).encode())

        def _send(self, status: int, kind: str, payload: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
