"""The server process: it starts with one line or fails with one line, and ends in order on a signal."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from hiradix.apps.engine.api import EngineConfig
from hiradix.apps.server import serve as serve_module
from hiradix.apps.server.flags import ServeConfig
from hiradix.apps.server.serve import start_up_line
from hiradix.cli import main
from hiradix.errors import CacheError

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60.0
KEYS = ("--api-key", "user-secret", "--admin-api-key", "admin-secret")
AUTH = {"Authorization": "Bearer user-secret"}


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


class Server:
    """A scripted server process; `url` is known once its start line was read."""

    def __init__(self, model: str, script: str, *arguments: str, **environment: str):
        command = [
            sys.executable,
            "-m",
            "tests.server.scripted_process",
            "--model-path",
            model,
            "--port",
            "0",
        ]
        self.process = subprocess.Popen(
            [*command, *KEYS, *arguments],
            cwd=ROOT,
            env={**os.environ, "SCRIPT": script, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self.url = ""

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if found := re.search(r"ready at (http://\S+)", line):
                self.url = found[1]
                return
        raise AssertionError(f"no start line: {self.end()}")

    def ask(self, *, stream: bool = False) -> httpx.Response:
        body = {"prompt": "a", "stream": stream}
        return httpx.post(
            f"{self.url}/v1/completions", json=body, headers=AUTH, timeout=DEADLINE_S, trust_env=False
        )

    def end(self, *signals: signal.Signals) -> tuple[int, str, str]:
        """Exit status, remaining output and errors after `signals`."""
        for number in signals:
            self.process.send_signal(number)
        out, err = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, out, err


@contextmanager
def server(model: str, script: str = "answer", *arguments: str, **environment: str) -> Iterator[Server]:
    started = Server(model, script, *arguments, **environment)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.communicate(timeout=DEADLINE_S)


def failed_start(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The line `hiradix serve` ends with, which must be the only one beside what it says of its progress."""
    assert main(["serve", *arguments]) == 2
    out, err = capsys.readouterr()
    progress = all(line.startswith("hiradix serve: ") and line.endswith(" ...") for line in out.splitlines())
    assert progress and err.count("\n") == 1 and err.startswith("hiradix serve: error: ")
    return err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_an_idle_server_with_status_0(model: str, number: signal.Signals) -> None:
    with server(model) as running:
        running.wait_ready()
        assert running.ask().json()["choices"][0]["text"] == "Hello!"
        status, out, err = running.end(number)
    assert (status, err) == (0, "")
    assert re.search(r"closed within [0-9.]+ s after 0 aborts", out)
    assert "secret" not in "".join(running.lines) + out


def test_start_lines_say_address_and_page_size(model: str) -> None:
    with server(model, "answer", "--enable-hierarchical-cache", "--served-model-name", "m") as running:
        running.wait_ready()
        running.end(signal.SIGTERM)
    text = "".join(running.lines)
    assert "m ready at http://127.0.0.1:" in text and "page size 64" in text


@contextmanager
def streaming(running: Server) -> Iterator[Iterator[str]]:
    """A streamed answer that has begun; its lines."""
    body = {"prompt": "a", "stream": True}
    with httpx.Client(headers=AUTH, timeout=DEADLINE_S, trust_env=False) as http:
        with http.stream("POST", f"{running.url}/v1/completions", json=body) as reply:
            lines = reply.iter_lines()
            assert "Hel" in next(lines)
            yield lines


def test_running_request_is_aborted_at_the_deadline(model: str) -> None:
    with server(model, "hold", "--shutdown-timeout", "0.2") as running:
        running.wait_ready()
        with streaming(running) as lines:
            running.process.send_signal(signal.SIGTERM)
            rest = list(lines)
        status, out, err = running.end()
    assert any('"finish_reason":"abort"' in line for line in rest) and "data: [DONE]" in rest
    assert (status, err) == (0, "") and "after 1 aborts" in out


def test_a_body_that_never_comes_does_not_hold_up_the_end(model: str) -> None:
    """It took all of the grace, and what may be sent of aborted answers' time besides."""
    with server(model, "answer", "--shutdown-timeout", "3600") as running:
        running.wait_ready()
        with socket.create_connection(("127.0.0.1", int(running.url.rsplit(":", 1)[1]))) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n")
            client.sendall(f"authorization: {AUTH['Authorization']}\r\nexpect: 100-continue\r\n\r\n".encode())
            assert client.recv(100).startswith(b"HTTP/1.1 100"), "the body is being read"
            client.sendall(b"{")
            status, _, _ = running.end(signal.SIGTERM)
    assert status == 0


def test_second_signal_does_not_wait(model: str) -> None:
    with server(model, "hold", "--shutdown-timeout", "3600") as running:
        running.wait_ready()
        with streaming(running) as lines:
            running.process.send_signal(signal.SIGTERM)
            wait_until_closed(running.url)
            running.process.send_signal(signal.SIGTERM)
            rest = list(lines)
            status, out, err = running.end()
    assert any('"finish_reason":"abort"' in line for line in rest) and "data: [DONE]" in rest
    assert (status, err) == (0, "") and "after 1 aborts" in out


def raw(running: Server, *sent: bytes) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", int(running.url.rsplit(":", 1)[1])), timeout=DEADLINE_S)
    for part in sent:
        client.sendall(part)
    return client


def asked(stream: bool) -> bytes:
    body = b'{"prompt": "a", "stream": %s}' % (b"true" if stream else b"false")
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: {AUTH['Authorization']}\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


PROBE = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.mark.parametrize("script", ["answer", "hold", "deaf", "flood", "hang"])
def test_docker_stop_is_soon_enough(model: str, script: str) -> None:
    """With all that may be under way the process is gone within the ten seconds that `docker stop` gives;
    it is given two here, of the product's own shares."""
    with server(model, script, "--shutdown-timeout", "2", PUNCTUAL="1") as running:
        running.wait_ready()
        held = [
            raw(running, PROBE),
            raw(running, b"GET /he"),
            raw(running, asked(True)),
            raw(running, asked(False)),
        ]
        for client in held[:1] + held[2:3]:
            assert client.recv(1000).startswith(b"HTTP/1.1 200")
        began_s = time.monotonic()
        status, out, err = running.end(signal.SIGTERM)
        took_s = time.monotonic() - began_s
        for client in held:
            client.close()
    assert status == 0 and took_s < 2 + DEADLINE_S / 4, (took_s, err)
    if script == "hang":
        assert "cut off" in err and "closed within" in out


def test_the_default_end_is_before_dockers() -> None:
    config = ServeConfig(EngineConfig(model_path="x"), "m")
    assert config.shutdown_timeout_s + serve_module.HARD_END_S < 10
    shares = serve_module.REQUESTS_SHARE + serve_module.ANSWERS_SHARE
    assert shares < 1, "nothing is left for the engine"


def test_a_second_signal_ends_what_hangs(model: str) -> None:
    with server(model, "deaf", "--shutdown-timeout", "3600", PUNCTUAL="1") as running:
        running.wait_ready()
        with raw(running, asked(True)) as client:
            assert client.recv(1000).startswith(b"HTTP/1.1 200")
            running.process.send_signal(signal.SIGTERM)
            wait_until_closed(running.url)
            status, _, _ = running.end(signal.SIGTERM)
    assert status == 0


def test_a_request_on_its_way_is_answered_at_the_end(model: str) -> None:
    """Of a connection that was kept: it was closed at once, and what the client had sent was lost."""
    with server(model) as running:
        running.wait_ready()
        with raw(running, PROBE) as client:
            assert client.recv(1000).startswith(b"HTTP/1.1 200")
            running.process.send_signal(signal.SIGTERM)
            wait_until_closed(running.url)
            client.sendall(asked(False))
            answer = b"".join(iter(lambda: client.recv(1000), b""))
        status, _, err = running.end()
    assert answer.startswith(b"HTTP/1.1 200") and b"connection: close" in answer and b"Hello!" in answer
    assert (status, err) == (0, "")


def wait_until_closed(url: str) -> None:
    """Return once nothing accepts connections at `url` any more."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        try:
            httpx.get(f"{url}/health", trust_env=False, timeout=DEADLINE_S)
        except httpx.TransportError:
            return
    raise AssertionError(f"{url} still accepts connections")


def test_signal_during_start(model: str) -> None:
    with server(model, "answer", SIGNAL="start") as running:
        status, out, err = running.end()
    assert (status, err) == (0, "") and "ready" not in out


def test_engine_failure_ends_the_process_with_status_1(model: str) -> None:
    with server(model, "fail") as running:
        running.wait_ready()
        assert running.ask().status_code == 503
        status, out, err = running.end()
    assert status == 1 and "engine failed" in err and "closed" in out


def test_bad_flag_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--model-path" in failed_start("--model-path", "no/such/model", capsys=capsys)
    assert "--enable-lmcache" in failed_start("--enable-lmcache", capsys=capsys)
    assert "--page-size" in failed_start("--model-path", "x", "--page-size", "y", capsys=capsys)


def test_port_in_use_is_one_line(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert port in failed_start("--model-path", model, "--port", port, capsys=capsys)


def test_host_that_is_not_ours_is_one_line(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--host" in failed_start("--model-path", model, "--host", "192.0.2.1", capsys=capsys)


def test_a_start_that_fails_leaves_no_trace_behind(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next start would be refused because of it."""
    trace = tmp_path / "trace"
    for _ in range(2):
        said = failed_start("--model-path", model, "--record-trace", str(trace), "--port", "0", capsys=capsys)
        assert "--model-path" in said and not trace.exists()


@pytest.mark.parametrize("host", [".", "a" * 64])
def test_host_that_is_no_name_is_one_line(host: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"--host {host}" in failed_start("--model-path", model, "--host", host, capsys=capsys)


@pytest.mark.parametrize("device", ["meta", "hpu", "vulkan", "gpu", "cpu:-1", "", "cuda:77"])
def test_device_that_cannot_hold_a_model_is_one_line(
    device: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`meta` has tensors without bytes: the pools were made there, and the first request ended the engine."""
    said = failed_start("--model-path", model, "--port", "0", "--device", device, capsys=capsys)
    assert f"--device {device}: " in said


def test_field_names_of_the_engine_become_flags() -> None:
    try:
        EngineConfig(model_path="x", max_waiting_requests=0)
    except CacheError as error:
        assert start_up_line(error).startswith("--max-queued-requests 0: must be at least 1")
    assert start_up_line(CacheError("a\nb")) == "a b"
    assert start_up_line(CacheError("model path 'x': no")) == "--model-path 'x': no"
    assert start_up_line(CacheError("check=3: no")) == "--check-invariants 3: no"
    assert start_up_line(CacheError("other=1: no")) == "other=1: no"


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [(["--help"], 0, "serve"), (["--version"], 0, "hiradix "), ([], 2, "usage"), (["fly"], 2, "fly")],
)
def test_command(arguments: list[str], status: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == status
    assert words in "".join(capsys.readouterr())


def test_help_of_serve(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    assert "--hicache-ratio" in capsys.readouterr().out


def test_the_command_line_needs_no_torch() -> None:
    code = (
        "import sys\nfrom hiradix.cli import main\nassert main(['serve', '--model-path', 'no/such']) == 2\n"
        "assert not {'torch', 'transformers', 'fastapi', 'uvicorn'} & set(sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, timeout=DEADLINE_S, check=True, capture_output=True
    )
