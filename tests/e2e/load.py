"""Prompts and clients for the fault tests: whole answers, and requests that leave early."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from hiradix.apps.bench.client import Answer, ChatRequest, ChatServer, LoadSettings, Message, replay
from hiradix.apps.bench.workload import long_text
from tests.e2e.warm import WarmServer

MODEL_NAME = "tiny"
PAGE_SIZE = 16
MAX_TOKENS = 6


def flags(model: Path, *more: str) -> list[str]:
    """Flags of every test server; `more` decides the cache.

    The gate is off: it would find, depending on the machine, that so small a model computes faster than
    anything loads.
    """
    always = ("--served-model-name", MODEL_NAME, "--log-level", "warning", "--hicache-no-regret", "off")
    return ["--model-path", str(model), *always, *more]


def three_tiers(model: Path, storage: Path, *more: str) -> list[str]:
    """Flags of a server with small device and host pools above a storage directory."""
    return tiers_over(model, "file", {}, "--file-storage-path", str(storage), *more)


def tiers_over(model: Path, backend: str, keys: Mapping[str, Any], *more: str) -> list[str]:
    """The same above any storage."""
    extra = {"prefetch_threshold": 16, "deadline_s": 60, **keys}
    return flags(
        model,
        *("--enable-hierarchical-cache", "--page-size", str(PAGE_SIZE), "--max-total-tokens", "4096"),
        *("--hicache-ratio", "1.5", "--check-invariants"),
        *("--hicache-storage-prefetch-policy", "wait_complete", "--hicache-storage-backend", backend),
        *("--hicache-storage-backend-extra-config", json.dumps(extra)),
        *more,
    )


def prompts(count: int, num_chars: int, *, seed: int) -> list[ChatRequest]:
    """Different real texts of num_chars characters (about 2 characters a token with the tiny tokenizer)."""
    text = long_text(200_000)
    rng = random.Random(seed)
    made = []
    for i in range(count):
        at = rng.randrange(len(text) - num_chars)
        message = Message("user", f"{seed}-{i} {text[at : at + num_chars]}")
        made.append(ChatRequest(f"prompt-{seed}-{i}", (message,), MAX_TOKENS))
    return made


def ask_all(url: str, requests: Sequence[ChatRequest], concurrency: int = 4) -> list[Answer]:
    """Whole answers, in the order of the requests."""

    async def run() -> list[Answer]:
        async with ChatServer(url, LoadSettings(concurrency=concurrency), model=MODEL_NAME) as server:
            return await replay(server, requests, lambda answer: None)

    return asyncio.run(run())


def reference_answers(model: Path, requests: Sequence[ChatRequest], log: Path) -> list[Answer]:
    """What a server without any cache answers."""
    with WarmServer(flags(model, "--disable-radix-cache"), log) as server:
        return ask_all(server.url, requests)


async def leave_early(url: str, request: ChatRequest, num_events: int, on_event: Callable[[], None]) -> None:
    """Read num_events events of a streamed answer (0: only send the request) and hang up."""
    body = request.body(MODEL_NAME, 0)
    timeout = httpx.Timeout(120.0)
    async with httpx.AsyncClient(timeout=timeout, trust_env=False) as client:
        async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
            seen = 0
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                seen += 1
                on_event()
                if seen >= num_events:
                    return
