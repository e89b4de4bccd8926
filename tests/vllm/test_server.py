"""vLLM's OpenAI server, its engine in a process of its own: clients that leave, a second server, metrics."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hiradix.apps.demo.process import free_port
from tests.vllm.play import FIRST
from tests.vllm.player import KV_BYTES, Player
from tests.vllm.test_host import shared_prefixes
from tests.vllm.test_storage import with_storage
from tests.warm import Forked, program

API_SERVER = "vllm.entrypoints.openai.api_server"
START_S = 300.0


class Serving:
    """vLLM's OpenAI server on a free port of loopback."""

    def __init__(self, model: Path, extra: dict[str, Any], folder: Path) -> None:
        folder.mkdir()
        self.port = free_port()
        self.log = folder / "log"
        transfer = {
            "kv_connector": "HiRadixConnector", "kv_connector_module_path": "hiradix.adapters.vllm",
            "kv_role": "kv_both", "kv_connector_extra_config": extra,
        }  # fmt: skip
        arguments = [
            "--model", str(model), "--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32",
            "--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "16", "--block-size", "32",
            "--num-gpu-blocks-override", "60", "--max-num-batched-tokens", "256",
            "--kv-cache-memory-bytes", str(KV_BYTES),
            "--served-model-name", "tiny", "--enable-prompt-tokens-details",
            "--kv-transfer-config", json.dumps(transfer),
        ]  # fmt: skip
        environment = {**FIRST, **os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        with self.log.open("wb") as log:
            self.process = self._spawn(arguments, environment, log.fileno())

    def _spawn(
        self, arguments: list[str], environment: dict[str, str], log: int
    ) -> subprocess.Popen[bytes] | Forked:
        command = [sys.executable, "-m", API_SERVER, *arguments]
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)

    def wait(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()[-3000:]
            try:
                self.get("/health")
                return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.5)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as reply:
            text: str = reply.read().decode()
            return text

    def complete(self, prompt: Sequence[int], max_tokens: int = 8) -> dict[str, Any]:
        """One greedy completion, with its tokens."""
        body = self._body(prompt, max_tokens)
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=240) as reply:
            done: dict[str, Any] = json.load(reply)
            return done

    def leave_early(self, prompt: Sequence[int]) -> None:
        """Ask for a long stream and hang up after its first bytes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=240)
        body = json.dumps(self._body(prompt, 200) | {"stream": True})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        connection.getresponse().read(10)
        connection.close()

    def _body(self, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
        return {
            "model": "tiny", "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip

    def figure(self, name: str) -> float:
        rows = [row for row in self.get("/metrics").splitlines() if row.startswith(f"vllm:hiradix_{name}")]
        return sum(float(row.rsplit(" ", 1)[1]) for row in rows if "_created" not in row)

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            pass
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # its engine too
        self.process.wait(30)


class WarmServing(Serving):
    """A Serving whose processes are forked from one that has imported vLLM."""

    def _spawn(
        self, arguments: list[str], environment: dict[str, str], log: int
    ) -> subprocess.Popen[bytes] | Forked:
        return program(API_SERVER, arguments, environment, log, log)


def token_ids(answer: dict[str, Any]) -> list[int]:
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


def cached_tokens(answer: dict[str, Any]) -> int:
    return int((answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0))


@pytest.fixture
def two_servers(model: Path, tmp_path: Path) -> Iterator[tuple[Serving, Serving]]:
    """Both over one store, with little device memory and vLLM's prefix cache on."""
    extra = with_storage("file", file_storage_path=str(tmp_path / "pages"))
    servers = tuple(WarmServing(model, extra, tmp_path / name) for name in "ab")
    try:
        for server in servers:
            server.wait()
        yield servers[0], servers[1]
    finally:
        for server in servers:
            server.stop()


def test_two_servers_one_store_and_clients_that_leave(
    two_servers: tuple[Serving, Serving], plain: Player
) -> None:
    first, second = two_servers
    prompts = shared_prefixes(40, seed=7)
    expected = [answer["tokens"] for answer in plain.generate(prompts)]
    with ThreadPoolExecutor(16) as clients:
        left = [clients.submit(first.leave_early, prompt) for prompt in prompts[:12]]
        answers = list(clients.map(first.complete, prompts))
        for one in left:
            one.result()
    assert [token_ids(answer) for answer in answers] == expected
    assert first.figure("saved_pages") > 0
    deadline = time.monotonic() + 120.0
    while not first.figure("stored_pages"):  # told with steps, of which the first one may come too early
        assert time.monotonic() < deadline
        first.complete(prompts[0])
    with ThreadPoolExecutor(16) as clients:
        answers = list(clients.map(second.complete, prompts))
    assert [token_ids(answer) for answer in answers] == expected
    assert second.figure("prefetch_read_pages") > 0 and sum(map(cached_tokens, answers)) > 0
    assert first.get("/health") == second.get("/health") == ""
