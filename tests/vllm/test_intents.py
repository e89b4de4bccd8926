"""Wishes while vLLM serves: held prefixes outlive pressure, forgotten ones are gone, brought ones are there."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from hiradix.apps.demo.process import free_port
from tests.vllm.conftest import Start
from tests.vllm.play import SETTLE_S
from tests.vllm.player import Player, assert_same
from tests.vllm.test_storage import PROMPTS, with_storage

KEY, PAGE = "a key", 32
HOST_PAGES = 60
SMALL = {"num_gpu_blocks_override": 40, "max_model_len": 512, "max_num_seqs": 4}
PROMPT = PROMPTS[0]
WHOLE = (len(PROMPT) - 1) // PAGE * PAGE


class Wisher:
    """The admin port of a player, whose steps carry wishes out."""

    def __init__(self, start: Start, extra: dict[str, Any], **engine: Any):
        self.port, self.num_pressed = free_port(), 0
        self.player = start({"admin_port": self.port, "admin_api_key": KEY} | extra, **engine)

    def call(self, method: str, path: str, body: Any = None, key: str = KEY) -> tuple[int, dict[str, Any]]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {key}"}
        asked = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers, method=method)
        try:
            with urllib.request.urlopen(asked, timeout=60) as reply:
                return reply.status, json.load(reply)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def wish(self, verb: str, **fields: Any) -> dict[str, Any]:
        """A wish about PROMPT, when it is held or has ended."""
        selector = {"tokens": PROMPT[:WHOLE]}
        status, receipt = self.call("POST", f"/hicache/prefix/{verb}", {"selector": selector, **fields})
        assert status in (200, 202), receipt
        return self.settled(receipt["id"], "held")

    def settled(self, number: int, *states: str) -> dict[str, Any]:
        """The receipt once it has ended, or is in one of these states, while vLLM takes steps."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            _, receipt = self.call("GET", f"/hicache/intents/{number}")
            if receipt["is_end"] or receipt["state"] in states:
                return receipt
            assert time.monotonic() < deadline, receipt
            self.player.generate([[5, 6, 7]], max_tokens=1)

    def explained(self) -> dict[str, Any]:
        """Where the last request's prompt came from."""
        (told,) = self.call("GET", "/explain?last=1")[1]["requests"]
        assert told["prompt_tokens"] == sum(told["by_source"].values())
        return dict(told)

    def press(self, times: float) -> None:
        """Serve prompts that nobody shares, of so many times the host's pages."""
        for _ in range(int(times * HOST_PAGES * PAGE / 256)):
            self.num_pressed += 1
            self.player.generate([[self.num_pressed + 100, *range(10, 265)]], max_tokens=1)
        self.player.settle()

    def cached(self, prompt: list[int] = PROMPT) -> int:
        (answer,) = self.player.generate([prompt])
        return int(answer["cached"])


def test_a_held_prefix_outlives_pressure_and_leaves_with_its_lease(start: Start, plain: Player) -> None:
    lru = {"hicache_ratio": HOST_PAGES / 40, "hicache_size": 0, "radix_eviction_policy": "lru"}
    ours = Wisher(start, lru, **SMALL)
    expected = plain.generate(PROMPTS[:1])
    assert_same(expected, ours.player.generate(PROMPTS[:2])[:1])
    ours.player.settle()
    held = ours.wish("hold", ttl_s=3600)
    assert held["state"] == "held" and held["done"]["tokens"] == WHOLE and not held["clipped"], held
    ours.press(10)
    assert ours.cached(PROMPTS[1]) == 0, "nobody held it"
    again = ours.player.generate(PROMPTS[:1])
    assert again[0]["cached"] == WHOLE
    assert_same(expected, again)
    told = ours.explained()
    assert told["by_source"].get("device", 0) + told["by_source"].get("host", 0) == WHOLE
    assert told["by_reason"] == {"boundary": len(PROMPT) - WHOLE}
    assert ours.call("GET", f"/hicache/intents/{held['id']}")[1]["saved_tokens"] >= WHOLE
    ended = ours.wish("hold", ttl_s=0.01)  # the same lease, which ends now
    assert ended["id"] == held["id"]
    assert ours.settled(held["id"])["state"] == "expired"
    ours.press(2)
    assert ours.cached() == 0
    assert ours.explained()["by_reason"] == {"evicted": WHOLE, "boundary": len(PROMPT) - WHOLE}


def test_what_is_vllms_own_is_refused_by_name_and_nobody_without_the_key(start: Start) -> None:
    ours = Wisher(start, {"hicache_size": 0.1}, **SMALL)
    ours.player.generate(PROMPTS[:1])
    selector = {"tokens": PROMPT[:WHOLE]}
    for verb, body in (("hold", {"ttl_s": 9, "tiers": ["device"]}), ("forget", {"tiers": ["device"]})):
        status, receipt = ours.call("POST", f"/hicache/prefix/{verb}", {"selector": selector, **body})
        assert status == 409 and "its blocks are the engine's own" in receipt["reason"]
    for path in ("/hicache/intents", "/hicache/intents/1", "/hicache/tenants", "/explain"):
        assert ours.call("GET", path, key="another")[0] == 401
    assert ours.call("POST", "/hicache/prefix/locate", {}, key="another")[0] == 401
    body = {"selector": {"tokens": [1], "extra_key": "x"}}
    status, answer = ours.call("POST", "/hicache/prefix/locate", body)
    assert (status, answer["field"]) == (400, "selector")


def test_forget_leaves_nothing_and_bring_has_it_there(start: Start, plain: Player, tmp_path: Path) -> None:
    """Also over kill -9."""
    folder = tmp_path / "pages"
    store = with_storage("file", file_storage_path=str(folder))
    expected = plain.generate(PROMPTS[:1])
    ours = Wisher(start, store, **SMALL)
    ours.player.generate(PROMPTS[:1])
    kept = ours.wish("bring", target="storage")
    assert kept["state"] == "done", kept
    ours.player.kill()
    back = Wisher(start, store, **SMALL)
    back.player.generate([[5, 6, 7]])
    warm = back.wish("bring", target="host")
    assert warm["state"] == "done" and warm["done"]["tokens"] == WHOLE, warm
    found = back.wish("locate", tiers=["host", "storage"])["found"]
    assert (found["host"]["tokens"], found["storage"]["tokens"]) == (WHOLE, WHOLE)
    assert back.cached() == WHOLE
    gone = back.wish("forget")
    assert gone["state"] == "done", gone
    assert gone["by_tier"]["host"]["tokens"] == gone["by_tier"]["storage"]["tokens"] == WHOLE
    left = [file for file in folder.rglob("*") if file.is_file() and file.stat().st_size > 4096]
    assert left == [], "no page's bytes"
    assert back.cached() == 0
    assert_same(expected, back.player.generate(PROMPTS[:1]))


def test_a_request_wishes_about_its_prompt(start: Start) -> None:
    ours = Wisher(start, {"hicache_size": 0.1}, **SMALL)
    ours.player.generate(PROMPTS[:1], salt="alice", wishes={"verb": "hold", "ttl_s": 3600})
    ours.player.settle()
    (receipt,) = ours.call("GET", "/hicache/intents")[1]["intents"]
    assert receipt["asked_by"] == "salt:alice"
    assert ours.settled(receipt["id"], "held")["state"] == "held"
    (row,) = ours.call("GET", "/hicache/tenants")[1]["tenants"]
    assert row["tenant"] == "salt:alice" and row["num_leases"] == 1
