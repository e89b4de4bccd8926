"""SGLang on the ladder, on a CPU, asked over HTTP. Its device forgets what it has no room for."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.tiny_model import write_tiny_model
from tests.ladder import store
from tests.ladder.climb import (
    CROWD_TOKENS,
    KEEP,
    MAX_TOKENS,
    TIERS,
    Answers,
    LadderEngine,
    Life,
    Run,
    Start,
)
from tests.ladder.needles import needles
from tests.puppet import ROOT
from tests.sglang.models import (
    write_gated_delta_model,
    write_latent_model,
    write_mamba2_model,
    write_window_model,
)
from tests.sglang.server import ADMIN_KEY, Answer, Server

PAGE = 16
DEVICE_TOKENS = 2048
SMALL: dict[str, Any] = {"max-total-tokens": 450, "schedule-conservativeness": 0.05}
FEW = SMALL | {"max-total-tokens": 420}
# On a CPU a request has one state, so pages are of one token.
ONE_STATE = {"page-size": 1, "disable-overlap-schedule": True, "max-mamba-cache-size": 24}
STATES = ONE_STATE | {"max-running-requests": 4}


class LadderServer(Server):
    """fault: the file that says what is planted. is_new: a new interpreter."""

    module = "tests.ladder.sglang_main"

    def __init__(self, model: Path, folder: Path, flags: Sequence[str], fault: Path, is_new: bool) -> None:
        super().__init__(model, folder, flags, {"HIRADIX_LADDER_FAULT": str(fault), "PYTHONPATH": str(ROOT)})
        self.is_warm = not is_new


class ServerLife(Life):
    """pages: of the store that is attached; None: there is none."""

    def __init__(self, server: LadderServer, run: Run, pages: Path | None) -> None:
        self._server, self._run = server, run
        self._has_store = pages is not None
        self._num_fillers = 0
        server.launch().wait()
        if pages is None:
            return
        keys = store.keys(pages, run.page) | {"hicache_storage_identity": "ladder"}
        try:
            server.attach(store.NAME, json.dumps(keys), hicache_storage_prefetch_policy="wait_complete")
        except BaseException:
            server.stop()
            raise

    def answer(self, prompts: Sequence[list[int]], num_tokens: int = MAX_TOKENS) -> Answers:
        return [_plain(self._server.ask(prompt, num_tokens)) for prompt in prompts]

    def crowd(self, prompts: Sequence[list[int]]) -> dict[int, dict[str, Any]]:
        # An answer that may end sooner is not reserved for: so requests are taken back.
        sampling = {"temperature": 0, "max_new_tokens": CROWD_TOKENS}
        kept = range(0, len(prompts), KEEP)
        doomed = [number for number in range(len(prompts)) if number % KEEP]
        with ThreadPoolExecutor(len(prompts)) as pool:
            asked = {
                number: pool.submit(self._server.ask, prompts[number], sampling_params=sampling)
                for number in kept
            }
            for number in doomed:
                pool.submit(self._ask_in_vain, prompts[number], f"doomed{number}")
            for number in doomed:
                time.sleep(0.02)
                self._server.admin("POST", "/abort_request", rid=f"doomed{number}")
            return {number: _plain(one.result()) for number, one in asked.items()}

    def _ask_in_vain(self, prompt: list[int], rid: str) -> None:
        with suppress(AssertionError, httpx.HTTPError, ValueError, KeyError):
            self._server.ask(prompt, CROWD_TOKENS, rid=rid)

    def begin_crowd(self, prompts: Sequence[list[int]]) -> None:
        for number, prompt in enumerate(prompts):
            asking = threading.Thread(target=self._ask_in_vain, args=(prompt, f"late{number}"), daemon=True)
            asking.start()

    def settle(self) -> None:
        """Nothing to be done: a flush and a detach wait for what is under way."""

    def forget(self, host: bool = False) -> None:
        if host:
            self._server.flush()
            return
        self._num_fillers += 1
        fillers = needles(2 * DEVICE_TOKENS // 200, self._run.page, f"fillers {self._num_fillers}")
        for filler in fillers:
            self._server.ask(filler.prompt, 1)

    def num_preempted(self) -> int:
        return int(self._server.metrics().get("sglang:num_retracted_requests_total", 0))

    def kill(self) -> None:
        self._server.stop()

    def stop(self) -> None:
        try:
            if self._has_store:
                self._server.detach()
            self._server.assert_healthy()
        finally:
            self._server.stop()


def _plain(answer: Answer) -> dict[str, Any]:
    tops = [{str(token): value for token, value in top.items()} for top in answer.tops]
    tiers = {tier: answer.tier(tier) for tier in TIERS}
    if not answer.details:
        tiers["device"] = answer.cached
    return {"tokens": list(answer.tokens), "logprobs": tops, **tiers}


class Sglang(LadderEngine):
    name = "SGLang"
    runs = {
        "full": Run(write_tiny_model, PAGE, {}, SMALL),
        "window": Run(write_window_model, PAGE, {"max-running-requests": 4}, SMALL),
        # `torch_native` attends to cached latent rows unlike to fresh ones, in SGLang's own cache too.
        "latent": Run(write_latent_model, PAGE, {}, SMALL, own_hits=True),
        "gated delta": Run(write_gated_delta_model, 1, STATES, FEW),
        "mamba 2": Run(write_mamba2_model, 1, STATES, FEW),
    }

    def start(self, run: Run, model: Path, start: Start) -> Life:
        flags: dict[str, Any] = {
            "page-size": run.page, "max-total-tokens": DEVICE_TOKENS, "max-running-requests": 8,
            "chunked-prefill-size": 128, "enable-metrics": True,
        }  # fmt: skip
        if start.pages is not None:
            flags |= {
                "radix-cache-backend": "hiradix", "enable-hierarchical-cache": True, "hicache-ratio": 12,
                "admin-api-key": ADMIN_KEY,
            }  # fmt: skip
            if start.layout:
                flags["hicache-mem-layout"] = start.layout
        elif not run.own_hits:
            flags["disable-radix-cache"] = True
        flags |= dict(run.engine) | dict(start.settings)
        words = [
            word
            for name, value in flags.items()
            for word in ((f"--{name}",) if value is True else (f"--{name}", str(value)))
        ]
        folder = start.log.with_name(f"{start.log.name}-server")
        return ServerLife(LadderServer(model, folder, words, start.fault, start.is_new), run, start.pages)
