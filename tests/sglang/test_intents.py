"""Wishes while SGLang serves: held prefixes outlive pressure, forgotten ones leave, brought ones are there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from hiradix.apps.demo.process import free_port
from tests.sglang.conftest import HIRADIX, HOST, LENGTH, WHOLE
from tests.sglang.prompts import tokens
from tests.sglang.server import ADMIN_KEY, Server, WarmServer
from tests.sglang.test_admin import keys

SETTLE_S = 120.0
POOL_TOKENS = 1280  # of the device, and of the host
SMALL = ("--max-total-tokens", str(POOL_TOKENS), "--hicache-ratio", "1")
PROMPT = tokens(LENGTH, "wished")
SELECTOR = {"tokens": list(PROMPT[:WHOLE])}


class Wisher:
    """A server whose cache listens for wishes."""

    def __init__(self, model: Path, folder: Path, *flags: str):
        self.port, self.num_pressed = free_port(), 0
        given = (*HIRADIX, *HOST, *SMALL, *flags)
        self.server: Server = WarmServer(model, folder, given, {"HIRADIX_ADMIN_PORT": str(self.port)})

    def call(self, method: str, path: str, body: Any = None, key: str = ADMIN_KEY) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.request(
            method, f"http://127.0.0.1:{self.port}{path}", json=body, headers=headers, timeout=30.0
        )

    def wish(self, verb: str, **fields: Any) -> dict[str, Any]:
        """A wish about PROMPT, once it is held or has ended."""
        reply = self.call("POST", f"/hicache/prefix/{verb}", {"selector": SELECTOR, **fields})
        assert reply.status_code in (200, 202), reply.text
        return self.settled(reply.json()["id"], "held")

    def settled(self, number: int, *states: str) -> dict[str, Any]:
        """The receipt once it has ended, or is in one of these states."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            receipt: dict[str, Any] = self.call("GET", f"/hicache/intents/{number}").json()
            if receipt["is_end"] or receipt["state"] in states:
                return receipt
            assert time.monotonic() < deadline, receipt
            time.sleep(0.1)

    def explained(self) -> dict[str, Any]:
        """Where the last request's prompt came from."""
        (told,) = self.call("GET", "/explain?last=1").json()["requests"]
        assert told["prompt_tokens"] == LENGTH == sum(told["by_source"].values())
        return dict(told)

    def press(self, times: float) -> None:
        """Serve prompts that nobody shares, of so many times what device and host have."""
        for _ in range(int(times * 2 * POOL_TOKENS / LENGTH) + 1):
            self.num_pressed += 1
            self.server.ask(tokens(LENGTH, f"pressure {self.num_pressed}"), 1)


@pytest.fixture
def wisher(model: Path, tmp_path: Path) -> Iterator[Wisher]:
    one = Wisher(model, tmp_path / "server")
    try:
        one.server.launch().wait()
        yield one
    finally:
        one.server.stop()


def test_each_verb_does_what_it_says(wisher: Wisher, model: Path, tmp_path: Path) -> None:
    """Held under pressure of ten times the pools, gone with its lease; stored, killed, brought and forgotten."""
    server = wisher.server
    first = server.ask(PROMPT)
    for tier in ("device", "host"):
        held = wisher.wish("hold", ttl_s=3600, tiers=[tier], wait_s=60)
        assert held["state"] == "held" and held["done"]["tokens"] == WHOLE, held
        assert wisher.call("DELETE", f"/hicache/intents/{held['id']}").json()["state"] == "cancelled"
    held = wisher.wish("hold", ttl_s=3600)
    wisher.press(10)
    again = server.ask(PROMPT)
    assert again.cached == WHOLE and again.tokens == first.tokens
    told = wisher.explained()
    sources = {tier: count for tier, count in told["by_source"].items() if tier != "computed"}
    assert sum(sources.values()) == WHOLE and told["by_reason"] == {"boundary": LENGTH - WHOLE}
    assert {tier: again.tier(tier) for tier in sources} == sources
    assert wisher.call("GET", f"/hicache/intents/{held['id']}").json()["saved_tokens"] >= WHOLE
    assert wisher.wish("hold", ttl_s=0.01)["id"] == held["id"]
    assert wisher.settled(held["id"])["state"] == "expired"
    wisher.press(2)
    assert server.ask(PROMPT).cached == 0
    assert wisher.explained()["by_reason"] == {"evicted": WHOLE, "boundary": LENGTH - WHOLE}

    server.attach("file", keys(tmp_path / "pages", hicache_storage_identity="same weights"))
    kept = wisher.wish("bring", target="storage")
    assert kept["state"] == "done", kept
    server.stop()
    again_up = Wisher(model, tmp_path / "again")
    try:
        again_up.server.launch().wait()
        again_up.server.attach("file", keys(tmp_path / "pages", hicache_storage_identity="same weights"))
        warm = again_up.wish("bring", target="host")
        assert warm["state"] == "done" and warm["done"]["tokens"] == WHOLE, warm
        back = again_up.server.ask(PROMPT)
        assert (back.tier("host"), back.tier("storage")) == (WHOLE, 0) and back.tokens == first.tokens
        gone = again_up.wish("forget")
        assert gone["state"] == "done", gone
        taken = {tier: amount["tokens"] for tier, amount in gone["by_tier"].items()}
        assert set(taken) == {"device", "host", "storage"}
        assert min(taken.values()) >= WHOLE, "what continues it, the answer's page, goes too"
        files = [file for file in (tmp_path / "pages").rglob("*") if file.is_file()]
        assert [file for file in files if file.stat().st_size > 4096] == [], "no page's bytes"
        assert again_up.server.ask(PROMPT).cached == 0
        again_up.server.assert_healthy()
    finally:
        again_up.server.stop()


def test_nobody_without_the_key(wisher: Wisher) -> None:
    for path in ("/hicache/intents", "/hicache/intents/1", "/hicache/tenants", "/explain"):
        assert wisher.call("GET", path, key="another").status_code == 401
    assert wisher.call("POST", "/hicache/prefix/locate", {}, key="another").status_code == 401
    assert wisher.call("GET", "/hicache/storage-backend").status_code == 404, "SGLang has its own"
    found = wisher.call("POST", "/hicache/prefix/locate", {"selector": SELECTOR, "tiers": ["host"]}).json()
    assert found["found"]["host"]["tokens"] == 0 and found["state"] == "done"
