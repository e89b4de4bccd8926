"""kill -9 while pages are being written, then a restart: it starts, and serves nothing wrong."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import pytest

from hiradix.bench_client import BenchError, ChatRequest, ChatServer, Limits, replay
from hiradix.bench_report import compare, tokens_by_source
from hiradix.demo.process import ServerProcess
from tests.e2e.load import MODEL_NAME, ask_all, prompts, reference_answers, three_tiers
from tests.e2e.tiny_model import write_window_model

NUM_PROMPTS = 4
NUM_CHARS = 1600
WAIT_S = 60.0


def num_files(folder: Path) -> int:
    return sum(1 for path in folder.rglob("*") if path.is_file())


async def kill_while_writing(
    server: ServerProcess, storage: Path, requests: list[ChatRequest], num_new: int
) -> int:
    """Ask everything at once, and kill the server when num_new more files are there; files then."""
    before = num_files(storage)

    async def ask() -> None:
        async with ChatServer(server.url, Limits(concurrency=NUM_PROMPTS), model=MODEL_NAME) as client:
            await replay(client, requests, lambda answer: None)

    asking = asyncio.create_task(ask())
    deadline = time.monotonic() + WAIT_S
    while num_files(storage) < before + num_new:
        assert time.monotonic() < deadline, f"{num_files(storage) - before} of {num_new} files were written"
        await asyncio.sleep(0)
    server.kill()
    try:
        await asking
    except BenchError:
        pass  # the answers that the crash cut off
    return num_files(storage)


@pytest.mark.timeout(1800)
def test_killed_while_writing_it_restarts_and_answers_the_same(
    tiny_model: Path, tmp_path: Path, num_runs: int
) -> None:
    assert_survives(tiny_model, tmp_path, [random.Random(20 + run).randint(1, 40) for run in range(num_runs)])


@pytest.mark.timeout(1800)
def test_killed_while_writing_windows_it_restarts_and_answers_the_same(tmp_path: Path, num_runs: int) -> None:
    """Storage has full pages without their window then; a prompt's window follows its 50 or so full pages."""
    model = write_window_model(tmp_path / "model")
    when = [random.Random(20 + run).randint(20, 200) for run in range(num_runs)]
    assert_survives(model, tmp_path, when, "--swa-full-tokens-ratio", "0.5")


def assert_survives(model: Path, folder: Path, when: list[int], *more: str) -> None:
    """Lives of a server over one storage, all but the last ended by kill -9 when so many files are new."""
    storage, log = folder / "storage", folder / "server.log"
    storage.mkdir()
    rounds = [prompts(NUM_PROMPTS, NUM_CHARS, seed=run) for run in range(len(when))]
    everything = [request for requests in rounds for request in requests]
    reference = dict(
        zip(everything, reference_answers(model, everything, folder / "off.log"), strict=True)
    )
    num_restored = 0
    known: list[ChatRequest] = []
    for requests, num_new in zip(rounds, when, strict=True):
        with ServerProcess(three_tiers(model, storage, *more), log) as server:
            answers = ask_all(server.url, known[-NUM_PROMPTS:])
            identity = compare(answers, [reference[request] for request in known[-NUM_PROMPTS:]])
            assert identity.holds or not answers, (identity, log.read_text()[-2000:])
            num_restored += tokens_by_source(answers)["storage"]
            asyncio.run(kill_while_writing(server, storage, requests, num_new))
            assert server.exit_code() == -9
        known += requests
    assert num_restored > 0, "no page survived any crash"
    command = three_tiers(model, storage, *more)
    assert_all_is_served(command, log, [(r, reference[r]) for r in known[-8:]])
    leftovers = [p.name for p in storage.rglob("*") if p.is_file() and "tmp" in p.name]
    assert leftovers == []


def assert_all_is_served(command: list[str], log: Path, pairs: list) -> None:  # type: ignore[type-arg]
    """A last life, stopped properly, answers from storage and leaves only whole pages behind."""
    requests, reference = zip(*pairs, strict=True)
    with ServerProcess(command, log) as server:
        assert compare(ask_all(server.url, requests), reference).holds
    with ServerProcess(command, log) as server:
        answers = ask_all(server.url, requests)
        assert compare(answers, reference).holds
        tokens = tokens_by_source(answers)
        assert tokens["storage"] > tokens["computed"], tokens
