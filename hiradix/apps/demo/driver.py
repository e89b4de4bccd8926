"""The demo from start to end: serve with the cache, restart, serve without it, compare."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from hiradix.apps.bench.client import Answer, ChatServer, LoadSettings, Phase, Play, play_phase, replay
from hiradix.apps.bench.report import (
    TIERS,
    compare,
    long_rows,
    summary,
    tier_shares,
    tokens_by_source,
)
from hiradix.apps.bench.workload import Workload
from hiradix.apps.demo.process import ServerProcess
from hiradix.apps.demo.view import View, result_table, show_verdict

MODEL_NAME = "SmolLM2-135M-Instruct"
MIN_TIER_SHARE = 0.10


@dataclass(frozen=True, slots=True)
class DemoConfig:
    """Sizes that make prefixes spill: the device pool holds about three long prompts, the host about five.

    storage_config: the storage backend's keys as JSON; without them it gets a directory of the demo's own.
    """

    model_path: Path
    work_dir: Path
    device_tokens: int = 4096
    host_ratio: float = 1.5
    page_size: int = 64
    num_threads: int = 2
    storage_backend: str = "disk"
    storage_config: str | None = None
    limits: LoadSettings = LoadSettings()

    def common_flags(self) -> list[str]:
        """Flags of both servers."""
        return [
            *("--model-path", str(self.model_path), "--served-model-name", MODEL_NAME),
            *("--max-total-tokens", str(self.device_tokens), "--num-threads", str(self.num_threads)),
            *("--max-running-requests", str(self.limits.concurrency), "--shutdown-timeout", "30"),
        ]

    def cache_flags(self, storage: str) -> list[str]:
        """Flags of the server with three tiers, the third below the directory `storage` if not elsewhere."""
        where = ["--file-storage-path", storage] if self.storage_config is None else []
        return [
            *("--enable-hierarchical-cache", "--page-size", str(self.page_size)),
            *("--hicache-ratio", str(self.host_ratio)),
            *("--hicache-storage-backend", self.storage_backend, *where),
            *("--hicache-storage-backend-extra-config", self.storage_config or '{"max_size": "4GiB"}'),
            *("--hicache-storage-prefetch-policy", "wait_complete"),
        ]


class Demo:
    """One run of the demo; `reference` has the cache-off answers to the same prompts in the same order."""

    def __init__(self, config: DemoConfig, workload: Workload, view: View) -> None:
        self._config = config
        self._workload = workload
        self._view = view
        self._play = Play(workload.conversations, config.limits.max_tokens)
        self._log = config.work_dir / "server.log"
        self._by_phase: list[list[Answer]] = []
        self.reference: list[Answer] = []
        self.num_restored_tokens = 0

    async def run(self) -> bool:
        """Play everything, print the result, and say whether every claim holds. The pages are deleted."""
        folder = self._config.work_dir
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix="storage-", dir=folder, ignore_cleanup_errors=True) as storage:
            for phases in self._lives():
                await self._serve_cached(phases, storage)
        await self._serve_reference()
        return self._report()

    def _lives(self) -> list[list[Phase]]:
        """The phases each server process serves, in order."""
        lives: list[list[Phase]] = [[]]
        for phase in self._workload.phases:
            if phase.restart:
                lives.append([])
            lives[-1].append(phase)
        return lives

    async def _serve_cached(self, phases: Sequence[Phase], storage: str) -> None:
        again = "again " if self._by_phase else ""
        config = self._config
        process = ServerProcess([*config.common_flags(), *config.cache_flags(storage)], self._log)
        with self._view.working(f"starting the server {again}with device, host and storage tiers"):
            process.launch()
        with process:
            async with ChatServer(process.url, config.limits) as server:
                for phase in phases:
                    with self._view.phase(phase.title, len(phase.visits)) as progress:
                        answers = await play_phase(server, self._play, phase, progress)
                    self._by_phase.append(answers)
                    if phase.restart:
                        self.num_restored_tokens += tokens_by_source(answers)["storage"]

    async def _serve_reference(self) -> None:
        process = ServerProcess([*self._config.common_flags(), "--disable-radix-cache"], self._log)
        with self._view.working("starting the server with the cache off"):
            process.launch()
        with process:
            async with ChatServer(process.url, self._config.limits) as server:
                with self._view.phase("same prompts, cache off", len(self.answers)) as progress:
                    for answers in self._by_phase:
                        requests = [answer.request for answer in answers]
                        self.reference += await replay(server, requests, progress)

    @property
    def answers(self) -> list[Answer]:
        """Answers of the server with the cache, in the order of the prompts."""
        return [answer for answers in self._by_phase for answer in answers]

    def claims(self) -> dict[str, bool]:
        """The demo's promises beside identity, and whether each holds."""
        shares = tier_shares(self.answers)
        restored = self.num_restored_tokens
        share_text = ", ".join(f"{tier} {shares[tier]:.0%}" for tier in TIERS)
        found = {
            f"each tier served over {MIN_TIER_SHARE:.0%} of the reused tokens: {share_text}": (
                min(shares.values()) > MIN_TIER_SHARE
            ),
            f"storage hits survived the restart: {restored:,} tokens": restored > 0,
            "the cache-off server reused nothing": all(a.sources.reused == 0 for a in self.reference),
        }
        for row in long_rows(self.answers, self.reference):
            if row.name in ("host", "storage"):
                ours, off = row.ttft_p50_s, row.off_p50_s
                faster = ours is not None and off is not None and ours < off
                times = "no such prompt" if ours is None else f"{ours:.2f} s, recomputed {off:.2f} s"
                found[f"long prompts from {row.name} start sooner: median {times}"] = faster
        return found

    def _report(self) -> bool:
        identity = compare(self.answers, self.reference)
        claims = self.claims()
        self._view.console.print(result_table(self.answers, self.reference))
        path = self._config.work_dir / "result.json"
        report = summary(self.answers, self.reference)
        path.write_text(json.dumps({**report, "claims": claims}, indent=2) + "\n", encoding="utf-8")
        self._view.say(f"all numbers: {path}   server log: {self._log}")
        show_verdict(self._view, claims, identity)
        return identity.holds and all(claims.values())
