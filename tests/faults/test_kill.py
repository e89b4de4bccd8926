"""kill -9 while pages are being written, then a restart: it starts, and serves nothing wrong."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hiradix.apps.bench.client import BenchError, ChatRequest, ChatServer, LoadSettings, replay
from hiradix.apps.bench.report import compare, tokens_by_source
from hiradix.apps.demo.process import ServerProcess
from hiradix.apps.storage_tools import main as verify
from hiradix.errors import ConfigError
from hiradix.storage.inventory import StoreAddress, scan
from tests.e2e.load import MODEL_NAME, ask_all, prompts, reference_answers, tiers_over
from tests.e2e.tiny_model import write_window_model
from tests.e2e.warm import WarmServer

NUM_PROMPTS = 4
NUM_CHARS = 1600
WAIT_S = 180.0


@dataclass(frozen=True)
class Store:
    """Where the servers of a test store pages. keys: the backend's."""

    url: str
    backend: str
    keys: Mapping[str, Any]

    def num_pages(self) -> int:
        try:
            return sum(1 for _ in scan(StoreAddress.parse(self.url)))
        except ConfigError:
            return 0  # not made yet

    def is_whole(self) -> bool:
        """Whether every page reads back."""
        settings = (f"--set={key}={value}" for key, value in self.keys.items() if "path" not in key)
        return verify(["verify", self.url, *settings]) == 0


def file_store(folder: Path) -> Store:
    return Store(f"file://{folder}", "file", {"file_storage_path": str(folder), "min_free_space": 0})


def disk_store(folder: Path) -> Store:
    keys = {"disk_storage_path": str(folder), "max_size": "256MiB", "min_free_space": 0}
    return Store(f"disk://{folder}", "disk", keys)


async def kill_while_writing(
    server: ServerProcess, store: Store, requests: list[ChatRequest], num_new: int
) -> None:
    """Ask everything at once, and kill the server when num_new more pages are there."""
    before = store.num_pages()

    async def ask() -> None:
        async with ChatServer(server.url, LoadSettings(concurrency=NUM_PROMPTS), model=MODEL_NAME) as client:
            await replay(client, requests, lambda answer: None)

    asking = asyncio.create_task(ask())
    deadline = time.monotonic() + WAIT_S
    while store.num_pages() < before + num_new:
        assert time.monotonic() < deadline, f"{store.num_pages() - before} of {num_new} pages were written"
        await asyncio.sleep(0.01)
    server.kill()
    try:
        await asking
    except BenchError:
        pass  # the answers that the crash cut off


@pytest.mark.long(30)
@pytest.mark.timeout(1800)
def test_killed_while_writing_it_restarts_and_answers_the_same(
    tiny_model: Path, tmp_path: Path, num_runs: int
) -> None:
    when = [random.Random(20 + run).randint(1, 40) for run in range(num_runs)]
    assert_survives(tiny_model, file_store(tmp_path / "storage"), tmp_path, when)
    leftovers = [p.name for p in (tmp_path / "storage").rglob("*") if p.is_file() and "tmp" in p.name]
    assert leftovers == []


@pytest.mark.long(40)
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("make_store", [file_store, disk_store])
def test_killed_while_writing_windows_it_restarts_and_answers_the_same(
    make_store: Callable[[Path], Store], tmp_path: Path, num_runs: int
) -> None:
    assert_windows_survive(make_store(tmp_path / "storage"), tmp_path, num_runs)


def assert_windows_survive(store: Store, folder: Path, num_runs: int) -> None:
    """Storage has full pages without their window then; a prompt's window follows its 50 or so full pages."""
    model = write_window_model(folder / "model")
    when = [random.Random(20 + run).randint(20, 200) for run in range(num_runs)]
    assert_survives(model, store, folder, when, "--swa-full-tokens-ratio", "0.5")
    assert len({page.fingerprint for page in scan(StoreAddress.parse(store.url))}) == 2


def assert_survives(model: Path, store: Store, folder: Path, when: list[int], *more: str) -> None:
    """Lives of a server over one storage, all but the last ended by kill -9 when so many pages are new."""
    log = folder / "server.log"
    command = tiers_over(model, store.backend, store.keys, *more)
    rounds = [prompts(NUM_PROMPTS, NUM_CHARS, seed=run) for run in range(len(when))]
    everything = [request for requests in rounds for request in requests]
    reference = dict(zip(everything, reference_answers(model, everything, folder / "off.log"), strict=True))
    num_restored = 0
    known: list[ChatRequest] = []
    for requests, num_new in zip(rounds, when, strict=True):
        with WarmServer(command, log) as server:
            answers = ask_all(server.url, known[-NUM_PROMPTS:])
            identity = compare(answers, [reference[request] for request in known[-NUM_PROMPTS:]])
            assert identity.holds or not answers, (identity, log.read_text()[-2000:])
            num_restored += tokens_by_source(answers)["storage"]
            asyncio.run(kill_while_writing(server, store, requests, num_new))
            assert server.exit_code() == -9
        known += requests
    assert num_restored > 0, "no page survived any crash"
    assert_all_is_served(command, log, [(r, reference[r]) for r in known[-8:]])
    assert store.is_whole()


def assert_all_is_served(command: list[str], log: Path, pairs: list) -> None:  # type: ignore[type-arg]
    """A life, stopped properly, and a last one of a new interpreter, which answers from storage."""
    requests, reference = zip(*pairs, strict=True)
    with WarmServer(command, log) as server:
        assert compare(ask_all(server.url, requests), reference).holds
    with ServerProcess(command, log) as server:
        answers = ask_all(server.url, requests)
        assert compare(answers, reference).holds
        tokens = tokens_by_source(answers)
        assert tokens["storage"] > tokens["computed"], tokens
