"""Storage attached, detached and swapped while a server answers: no request fails or differs, memory flat."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from hiradix.apps.bench.client import Answer
from hiradix.apps.bench.report import compare, tokens_by_source
from hiradix.apps.demo.process import ServerProcess
from tests.e2e.load import PAGE_SIZE, ask_all, flags, prompts, reference_answers

NUM_CYCLES = int(os.environ.get("HIRADIX_ATTACH_CYCLES", "30"))
STORAGE = "/hicache/storage-backend"
REQUESTS = prompts(6, 700, seed=5)
WARM_CYCLES = 15
GROWTH_LIMIT_BYTES = 16 << 20  # over all later cycles


class Load(threading.Thread):
    """Asks the same questions over and over until it is told to stop; keeps every answer."""

    def __init__(self, url: str):
        super().__init__(daemon=True)
        self.url = url
        self.rounds: list[list[Answer]] = []
        self.failure: BaseException | None = None
        self.stopping = threading.Event()
        self.changed = threading.Condition()

    def wait_for_round(self) -> None:
        """Until a round that begins from here on has ended."""
        with self.changed:
            wanted = len(self.rounds) + 2
            assert self.changed.wait_for(lambda: len(self.rounds) >= wanted or self.failure, 120)

    def run(self) -> None:
        try:
            while not self.stopping.is_set():
                answers = ask_all(self.url, REQUESTS, concurrency=3)
                with self.changed:
                    self.rounds.append(answers)
                    self.changed.notify_all()
        except BaseException as error:
            with self.changed:
                self.failure = error
                self.changed.notify_all()


def resident_bytes(server: ServerProcess) -> int:
    assert server._process is not None
    text = Path(f"/proc/{server._process.pid}/statm").read_text(encoding="ascii")
    return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.long(25)
@pytest.mark.timeout(0 if NUM_CYCLES > 50 else 600)
def test_storage_is_swapped_under_load(
    tiny_model: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    log = tmp_path / "server.log"
    reference = reference_answers(tiny_model, REQUESTS, tmp_path / "off.log")
    arguments = flags(
        tiny_model,
        *("--enable-hierarchical-cache", "--page-size", str(PAGE_SIZE), "--max-total-tokens", "1024"),
        *("--hicache-ratio", "0.8", "--admin-api-key", "admin", "--check-invariants"),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--attach-allow", f"backend=file,path={tmp_path}"),
    )
    with ServerProcess(arguments, log) as server:
        load = Load(server.url)
        load.start()
        headers = {"Authorization": "Bearer admin"}
        with httpx.Client(base_url=server.url, headers=headers, timeout=90, trust_env=False) as http:
            sizes = []
            for n in range(NUM_CYCLES):
                cycle(http, tmp_path / "ab"[n % 2], load if n % 3 == 0 else None)
                sizes.append(resident_bytes(server))
        load.stopping.set()
        load.join(120)
        assert load.failure is None and not load.is_alive(), (load.failure, log.read_text()[-2000:])
        with httpx.Client(base_url=server.url, headers=headers, timeout=90, trust_env=False) as http:
            flushed = http.post("/flush_cache?timeout=60")
            assert flushed.status_code == 200, flushed.text
            info = http.get("/server_info").json()["engine"]
        assert info["available_tokens"] == info["max_total_tokens"], info
    assert server.exit_code() == 0
    num_answers = sum(len(answers) for answers in load.rounds)
    from_storage = sum(tokens_by_source(answers)["storage"] for answers in load.rounds)
    growth = sizes[-1] - sizes[min(WARM_CYCLES, NUM_CYCLES - 1)]
    record_property(
        "told",
        f"{NUM_CYCLES} swaps beside {num_answers} answers, {from_storage} tokens from storage; "
        f"memory {growth / 2**20:+.1f} MiB after the first {WARM_CYCLES}",
    )
    for answers in load.rounds:
        assert compare(answers, reference).holds
    assert from_storage > 0 and num_answers >= NUM_CYCLES
    assert growth <= GROWTH_LIMIT_BYTES


def cycle(http: httpx.Client, place: Path, load: Load | None) -> None:
    """Attach a directory, serve on it (with `load`: until all was asked again), and detach."""
    extra = json.dumps({"file_storage_path": str(place), "prefetch_threshold": PAGE_SIZE, "deadline_s": 60})
    body = {"hicache_storage_backend": "file", "hicache_storage_backend_extra_config_json": extra}
    attached = http.put(f"{STORAGE}?wait=60", json=body)
    assert attached.status_code == 200, attached.text
    other = http.put(f"{STORAGE}?wait=60", json={**body, "hicache_write_policy": "write_through"})
    assert other.status_code == 200 and "policies updated" in other.text
    if load is not None:
        load.wait_for_round()
    detached = http.delete(f"{STORAGE}?wait=60")
    assert detached.status_code == 200, detached.text
