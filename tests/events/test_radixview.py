"""The third-party viewer radixview on our own server: it finds the sockets and shows what is where."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

pytest.importorskip("zmq")
pytest.importorskip("radixview")

from radixview.discover import load_publishers
from radixview.subscribe import listen
from radixview.tree import CacheTree

from hiradix.apps.demo.process import ServerProcess
from hiradix.tree import RadixKey
from tests.e2e.tiny_model import write_tiny_model
from tests.events.model import Router, key_names
from tests.events.subscriber import DEADLINE_S, Subscriber

PAGE = 16
CONFIG = '{"publisher": "zmq", "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"}'
PROMPTS = [[3 + (7 * i + j) % 200 for j in range(4 * PAGE)] for i in range(12)]


class Watched(CacheTree):
    """radixview's tree, which says when it has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = threading.Condition()

    def apply_stored(self, event: dict, decode: Any = None) -> None:
        super().apply_stored(event, decode)
        self._tell()

    def remove(self, hashes: list) -> None:
        super().remove(hashes)
        self._tell()

    def clear(self) -> None:
        super().clear()
        self._tell()

    def _tell(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def media(self) -> dict[int, str]:
        """The medium of each block."""
        view = self.view()
        return {int(block.hash): block.medium for run in view.runs.values() for block in run}

    def wait(self, is_there: Callable[[dict[int, str]], bool]) -> dict[int, str]:
        seen: list[dict[int, str]] = []

        def look() -> bool:
            seen[:] = [self.media()]
            return is_there(seen[0])

        with self.changed:
            assert self.changed.wait_for(look, DEADLINE_S), seen
        return seen[0]


@dataclass
class Server:
    url: str
    http: httpx.Client

    def ask(self, prompt: list[int]) -> dict[str, int]:
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
        reply = self.http.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        tiers: dict[str, int] = reply.json()["usage"]["cached_tokens_details"]
        return tiers


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real server whose device pool holds four of the prompts, with a host tier and files below."""
    folder = tmp_path_factory.mktemp("events")
    flags = [
        *("--model-path", str(write_tiny_model(folder)), "--page-size", str(PAGE)),
        *("--max-total-tokens", str(17 * PAGE), "--enable-hierarchical-cache", "--hicache-ratio", "2"),
        *("--hicache-storage-backend", "file", "--file-storage-path", str(folder / "store")),
        *("--hicache-storage-backend-extra-config", '{"prefetch_threshold": 1, "deadline_s": 30}'),
        *("--hicache-no-regret", "off", "--hicache-storage-prefetch-policy", "wait_complete"),
        *("--radix-eviction-policy", "lru"),  # by which one of PROMPTS leaves both other tiers
        *("--check-invariants", "--kv-events-config", CONFIG),
    ]
    process = ServerProcess(flags, folder / "server.log")
    process.launch()
    try:
        with httpx.Client(base_url=process.url, trust_env=False, timeout=DEADLINE_S) as http:
            yield Server(process.url, http)
        assert process.stop() == 0, process.tail()
    finally:
        process.kill()


@pytest.fixture
def viewer(server: Server) -> Iterator[Watched]:
    """radixview, found by `/server_info`, subscribed, and looking at an empty cache."""
    publishers = load_publishers(server.url)
    assert publishers.block_size == PAGE and len(publishers.ranks) == 1
    tree, stop = Watched(), threading.Event()
    thread = threading.Thread(target=listen, args=(publishers, stop, None, tree))
    thread.start()
    try:
        number = 0
        while not tree.media():  # until the subscription has arrived
            number += 1
            server.ask([9 + number % 200, *PROMPTS[0][1:]])
        assert server.http.post("/flush_cache?timeout=30").status_code == 200
        tree.wait(lambda media: not media)
        yield tree
    finally:
        stop.set()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def names(prompt: list[int]) -> list[int]:
    return key_names(RadixKey(prompt), PAGE, False)


def test_the_viewer_shows_where_every_prompt_is(server: Server, viewer: Watched) -> None:
    for prompt in PROMPTS[:3]:
        server.ask(prompt)
    wanted = {name for prompt in PROMPTS[:3] for name in names(prompt)}
    media = viewer.wait(lambda media: media.keys() == wanted and {*media.values()} == {"DISK"})
    assert len(media) == 12
    snapshot = viewer.snapshot()
    assert snapshot["stats"] == {"blocks": 12, "tokens": 12 * PAGE, "nodes": 3, "missing": 0}
    for prompt in PROMPTS[3:6]:  # the first ones leave the device
        server.ask(prompt)
    media = viewer.wait(lambda media: len(media) == 24 and "CPU_PINNED" in media.values())
    assert set(media) == {name for prompt in PROMPTS[:6] for name in names(prompt)}
    assert server.http.post("/flush_cache?timeout=30").status_code == 200
    viewer.wait(lambda media: not media)


def test_a_router_knows_what_each_request_will_hit(server: Server) -> None:
    """Media kept apart: what is said to be on device and host is what the next request gets from there."""
    subscriber = Subscriber(server.http.get("/server_info").json()["kv_events"])
    from_storage = 0
    try:
        for prompt in [*PROMPTS, *PROMPTS[::3], *PROMPTS[:2]]:
            router = caught_up(server, subscriber)
            blocks = names(prompt)[: (len(prompt) - 1) // PAGE]  # the last token is always computed
            said = {medium: first_gap(blocks, router.media.get(medium, set())) for medium in router.media}
            got = server.ask(prompt)
            on_device = said.get("GPU", 0)
            local = router.media.get("GPU", set()) | router.media.get("CPU_PINNED", set())
            loadable = first_gap(blocks, local)
            assert (got["device"], got["host"]) == (on_device * PAGE, (loadable - on_device) * PAGE)
            if loadable == 0 and said.get("DISK", 0):
                from_storage += 1
                assert got["storage"] == said["DISK"] * PAGE
        assert from_storage, "no prompt had left both other tiers"
    finally:
        subscriber.close()


def caught_up(server: Server, subscriber: Subscriber) -> Router:
    """A router that has read all there is to say, with nothing under way."""
    until = time.monotonic() + DEADLINE_S
    while True:
        info = server.http.get("/server_info").json()
        if not info["cache"]["num_in_flight"] and not info["kv_events_figures"]["num_waiting"]:
            break
        assert time.monotonic() < until, info
    router = Router(PAGE)
    router.read(subscriber.catch_up(info["kv_events_figures"]["num_sent"]))
    return router


def first_gap(blocks: list[int], there: set[int]) -> int:
    return next((i for i, name in enumerate(blocks) if name not in there), len(blocks))
