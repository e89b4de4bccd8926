"""Other kinds of attention on live servers, over SGLang's pools as they are: windows, latent rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sglang.conftest import DEVICE_TOKENS, HIRADIX, HOST, LENGTH, PAGE_SIZE, WHOLE
from tests.sglang.models import write_latent_model, write_window_model
from tests.sglang.prompts import families, prompts, tokens
from tests.sglang.server import Server, WarmServer, assert_right_at_once

FLAGS = (*HIRADIX, *HOST, "--max-running-requests", "4")


@pytest.fixture(scope="module")
def servers_of_kinds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    folder = tmp_path_factory.mktemp("kinds")
    models = {
        "windows": write_window_model(folder / "window-model"),
        "latent": write_latent_model(folder / "latent-model"),
    }
    found = {kind: WarmServer(model, folder / kind, FLAGS) for kind, model in models.items()}
    try:
        for server in found.values():
            server.launch()
        for server in found.values():
            server.wait()
        yield found
    finally:
        for server in found.values():
            server.stop()


@pytest.fixture
def windows(servers_of_kinds: dict[str, Server]) -> Iterator[Server]:
    server = servers_of_kinds["windows"]
    server.flush()
    yield server
    server.flush()
    server.assert_healthy()


def test_sliding_windows_are_served_from_two_pools(windows: Server) -> None:
    assert "hybrid_swa=True" in windows.log()


def test_full_and_window_pages_come_back_from_the_host(windows: Server) -> None:
    asked = prompts(2 * DEVICE_TOKENS // LENGTH, LENGTH, "windows")
    first, again = [windows.ask(p) for p in asked], [windows.ask(p) for p in asked]
    assert all(a.cached == 0 for a in first) and all(a.cached == WHOLE for a in again)
    assert sum(a.tier("host") for a in again) >= WHOLE
    assert [a.tokens for a in again] == [a.tokens for a in first]


def test_concurrent_requests_with_windows(windows: Server) -> None:
    assert_right_at_once(windows, families(60, 5, "window load"))


def test_long_answers_slide_their_windows(windows: Server) -> None:
    """Window slots of running requests are freed while they run; the answers can be continued."""
    prompt = tokens(100, "sliding")
    apart = windows.ask(prompt, 300, extra_key="apart")
    answer = windows.ask(prompt, 300)
    assert answer.tokens == apart.tokens
    turn = [*prompt, *answer.tokens, *tokens(20, "next turn")]
    continued, alone = windows.ask(turn), windows.ask(turn, extra_key="apart too")
    assert continued.cached >= 300 and alone.cached == 0
    assert continued.tokens == alone.tokens


@pytest.mark.parametrize("backend", ["file", "disk"])
def test_full_and_window_pages_come_back_from_storage(windows: Server, backend: str, tmp_path: Path) -> None:
    """After a flush, and after a restart of the backend: all of a prompt, and the answers are the same."""
    keys = {f"{backend}_storage_path": str(tmp_path), "max_size": "16MiB", "prefetch_threshold": PAGE_SIZE}
    policy = {"hicache_storage_prefetch_policy": "wait_complete"}
    asked = prompts(3, LENGTH, ("stored windows", backend))
    windows.attach(backend, json.dumps(keys), **policy)
    first = [windows.ask(p) for p in asked]
    for _ in range(2):
        windows.detach()
        windows.flush()
        windows.attach(backend, json.dumps(keys), **policy)
        again = [windows.ask(p) for p in asked]
        assert [a.tier("storage") for a in again] == [WHOLE] * len(asked), [a.details for a in again]
        assert [a.tokens for a in again] == [a.tokens for a in first]
    windows.detach()


def test_storage_that_holds_full_attention_only_is_refused(windows: Server, tmp_path: Path) -> None:
    keys = json.dumps({"file_storage_path": str(tmp_path), "naming": "sglang"})
    reply = windows.ask_to_attach("file", keys)
    assert reply.status_code == 400 and "naming" in reply.text
    assert "full attention only" in windows.log()


def test_latent_rows_come_back_from_the_host_as_they_were(servers_of_kinds: dict[str, Server]) -> None:
    """Compared with hits on the device: `torch_native` attends to cached latent rows unlike to fresh ones, in
    SGLang's own cache too."""
    server = servers_of_kinds["latent"]
    asked = prompts(2 * DEVICE_TOKENS // LENGTH, LENGTH, "latent")
    on_device = []
    for prompt in asked:
        server.ask(prompt)
        on_device.append(server.ask(prompt))
    from_host = [server.ask(p) for p in asked]
    assert all(a.tier("device") == WHOLE for a in on_device)
    assert sum(a.tier("host") for a in from_host) >= WHOLE
    assert [a.tokens for a in from_host] == [a.tokens for a in on_device]
    server.flush()
    server.assert_healthy()
