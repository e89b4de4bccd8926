"""`hiradix serve --tp-size 2`: one server over two processes, which end together."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import httpx
import pytest

from hiradix.apps.demo.process import ServerProcess
from hiradix.cli import main
from tests.e2e.tiny_model import write_tiny_model
from tests.server.test_real_engine import ADMIN, PAGE, PROMPT, STORAGE, ask, cached, flags, serving, tokens

DEADLINE_S = 150.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def followers(server: ServerProcess) -> list[int]:
    """Process ids of the other ranks."""
    assert server._process is not None
    pid = server._process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(c) for c in children if b"spawn_main" in Path(f"/proc/{c}/cmdline").read_bytes()]


def gone(pid: int) -> bool:
    """Whether the process ends within the deadline (a zombie has ended)."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z"):
                return True
        except OSError:
            return True
        time.sleep(0.1)
    return False


def exit_code(server: ServerProcess) -> int | None:
    assert server._process is not None
    return server._process.wait(DEADLINE_S)


@pytest.mark.long(12)
@pytest.mark.timeout(900)
def test_two_ranks_serve_administer_and_end_together(model: Path, tmp_path: Path) -> None:
    with serving(model) as http:
        expected = tokens(ask(http, PROMPT))
    keys = {"file_storage_path": str(tmp_path / "pages"), "prefetch_threshold": PAGE, "deadline_s": 60}
    extra = json.dumps(keys)
    body = {"hicache_storage_backend": "file", "hicache_storage_backend_extra_config_json": extra}
    allowed = ("--attach-allow", f"backend=file,path={tmp_path}")
    server = ServerProcess(flags(model, "--tp-size", "2", *allowed), tmp_path / "server.log")
    with server, httpx.Client(base_url=server.url, trust_env=False, timeout=DEADLINE_S) as http:
        assert http.put(STORAGE, json=body, headers=ADMIN).status_code == 200
        assert tokens(ask(http, PROMPT)) == expected
        again = ask(http, PROMPT)
        assert tokens(again) == expected and cached(again)["device"] > 0
        assert ask_badly(http) == 400
        (other,) = followers(server)
    assert "tensor parallel size 2" in server.tail(50)
    assert gone(other)
    log = (tmp_path / "server.log").read_text()
    assert "Traceback" not in log, log
    names = {file.parent.name for file in (tmp_path / "pages").rglob("*") if file.is_file()}
    assert len(names) > 1, f"pages of both ranks' fingerprints are expected, found {names}"


def ask_badly(http: httpx.Client) -> int:
    """A request no rank can serve is refused on all of them, and harms none."""
    body = {"prompt": [9] * 5000, "max_tokens": 1, "model": "tiny"}
    return http.post("/v1/completions", json=body).status_code


@pytest.mark.long(15)
@pytest.mark.timeout(900)
def test_a_killed_rank_ends_the_server_and_a_killed_server_its_ranks(model: Path, tmp_path: Path) -> None:
    server = ServerProcess(flags(model, "--tp-size", "2"), tmp_path / "server.log")
    server.launch()
    os.kill(followers(server)[0], signal.SIGKILL)
    assert exit_code(server) == 1
    assert "RankLost" in (tmp_path / "server.log").read_text()
    assert "hiradix serve: error: the engine failed" in server.tail()
    second = ServerProcess(flags(model, "--tp-size", "2"), tmp_path / "second.log")
    second.launch()
    (other,) = followers(second)
    second.kill()
    assert gone(other)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--tp-size 3", "--tp-size 3: the model's num_attention_heads is 4"),
        ("--tp-size 0", "--tp-size must be >= 1"),
        ("--tp-size 2 --dist-timeout 0", "--dist-timeout"),
    ],
)
def test_a_size_the_model_cannot_be_cut_to_is_one_line(
    model: Path, arguments: str, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--model-path", str(model), "--port", "0", *arguments.split()]) == 2
    assert words in capfd.readouterr().err
