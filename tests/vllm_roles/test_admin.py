"""Storage attached and detached while requests run, and the endpoint that asks for it."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

import pytest

from hiradix.adapters.admin import PATH, AdminCalls, AdminServer
from hiradix.adapters.vllm.orders import StorageSwitched
from hiradix.config import ExtraConfig
from hiradix.errors import ConfigError
from hiradix.explain import MOST_KEPT, Explanation, Reason, RecentExplanations, Span, TokenSource
from hiradix.intents.http import IntentApi
from hiradix.policy.prefetch_policy import PrefetchLimits, PrefetchPolicy
from hiradix.storage.attach.rules import AttachRules, Prepared, parse_rule
from tests.vllm_roles.mini_vllm import MiniVLLM, S, World
from tests.vllm_roles.test_life import request

Asked = list[tuple[str | None, ExtraConfig, str | None]]
KEY = "schlüssel"
BACKEND, KEYS = "hicache_storage_backend", "hicache_storage_backend_extra_config_json"


@pytest.fixture
def asked() -> Asked:
    return []


@pytest.fixture
def server(asked: Asked) -> Iterator[AdminServer]:
    prepared = {"cold": Prepared("disk", {"disk_storage_path": "/c"}), "default": Prepared("file", {})}
    rules = AttachRules(prepared, (parse_rule("backend=file,path=/tmp"),))
    calls = AdminCalls(lambda *what: asked.append(what), lambda: {"password": "x"}, KEY, rules)
    server = AdminServer(0, calls)
    yield server
    server.close()


def call(server: AdminServer, method: str, body: object = None, path: str = PATH, key: str = KEY) -> Any:
    """The status and the answer. body: JSON, or the bytes of what is none."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}".encode()}
    asking = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    asking.request(method, path, data, headers)
    reply = asking.getresponse()
    return reply.status, json.load(reply)


def test_put_and_delete_are_asked_and_shown(server: AdminServer, asked: Asked) -> None:
    keys = json.dumps({"file_storage_path": "/tmp/x", "prefetch_threshold": 7})
    body = {BACKEND: "file", KEYS: keys, "hicache_storage_prefetch_policy": "wait_complete"}
    assert call(server, "PUT", body)[0] == 202
    assert call(server, "PUT", {"name": "cold"})[0] == 202
    assert call(server, "PUT", {BACKEND: "file"})[0] == 202  # that of the start
    assert call(server, "DELETE")[0] == 202
    extra = ExtraConfig(prefetch_threshold=7, backend={"file_storage_path": "/tmp/x"})
    assert asked == [
        ("file", extra, "wait_complete"),
        ("disk", ExtraConfig(backend={"disk_storage_path": "/c"}), None),
        ("file", ExtraConfig(), None),
        (None, ExtraConfig(), None),
    ]
    assert call(server, "GET") == (200, {"password": "***"})


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, BACKEND),
        ({BACKEND: "no such"}, "not allowed over HTTP"),
        ({BACKEND: "disk", KEYS: "{}"}, "not allowed over HTTP"),
        ({BACKEND: "file", KEYS: "@/etc/passwd"}, "@file is not allowed over HTTP"),
        (
            {BACKEND: "file", KEYS: '{"file_storage_path": "/etc"}'},
            "file_storage_path: not allowed over HTTP",
        ),
        ({BACKEND: "dynamic", KEYS: '{"module_path": "os"}'}, "not allowed over HTTP"),
        ({"name": "warm"}, "there are: cold, default"),
        ({"name": "cold", KEYS: "{}"}, "name: stands for"),
        ({BACKEND: "file", KEYS: 3}, "must be text"),
        ({BACKEND: "file", KEYS: "[" * 5000}, "not valid"),
        (
            {BACKEND: "file", KEYS: '{"file_storage_path": "/tmp/x", "prefetch_threshold": -1}'},
            "prefetch_threshold",
        ),
        ({BACKEND: "file", "hicache_storage_prefetch_policy": "never"}, "hicache_storage_prefetch_policy"),
        ({BACKEND: "file", "hicache_write_policy": "write_back"}, "hicache_write_policy"),
        ({BACKEND: "file", "hicache_storage_backend_extra_config": {}}, "extra_config: not known"),
        ([BACKEND], BACKEND),
        (b"[" * 100_000, "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (b"", "no JSON"),
    ],
)
def test_bad_bodies_are_named(server: AdminServer, asked: Asked, body: object, words: str) -> None:
    status, answer = call(server, "PUT", body)
    assert status == 400 and words in answer["message"] and not asked


def test_what_is_attached_brings_its_prefetch_policy() -> None:
    """And keeps it until another one is asked for."""
    role = MiniVLLM(World(num_workers=1)).role
    before, other = role.prefetcher.policy, PrefetchPolicy("timeout", PrefetchLimits(page_size=S))
    seen = []
    for name, policy in (("first", None), ("second", other), ("third", None), (None, None)):
        role.storage.ask(name, {}, policy)
        assert [order.name for order in role.step([], lambda request_id: []).storage] == [name]
        role.apply([StorageSwitched(len(seen) + 1, True)])
        seen.append(role.prefetcher.policy)
    assert seen == [before, other, other, other]


def test_keys_and_paths_are_checked(server: AdminServer, asked: Asked) -> None:
    assert call(server, "DELETE", key="wrong")[0] == 401
    assert call(server, "DELETE", path="/elsewhere")[0] == 404
    assert not asked
    with pytest.raises(ConfigError, match="admin_port"):
        AdminServer(server.port, AdminCalls(lambda *what: None, dict))


def test_a_length_of_thousands_of_digits_is_none(server: AdminServer) -> None:
    headers = {"Authorization": f"Bearer {KEY}".encode(), "Content-Length": "9" * 5000}
    asking = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    asking.request("PUT", PATH, None, headers)
    assert asking.getresponse().status == 400


def test_only_the_latest_explanations_are_kept() -> None:
    explanations, spans = RecentExplanations(), (Span(0, 5, TokenSource.COMPUTED, Reason.NEVER_SEEN),)
    for number in [*range(MOST_KEPT + 2), 2]:
        explanations.keep(Explanation(str(number), spans))
    explanations.keep(Explanation("last", spans))
    for name in ("0", "1", "3"):
        with pytest.raises(ConfigError, match="is not among the last"):
            explanations.one(name)
    assert explanations.one("2")["prompt_tokens"] == explanations.one("4")["prompt_tokens"] == 5
    shown: Any = explanations.latest("2")["requests"]
    assert [one["id"] for one in shown] == ["last", "2"]


def test_explanations_are_shown_with_the_key_alone() -> None:
    explanations = RecentExplanations()
    for name in ("a/b", "c"):
        explanations.keep(Explanation(name, (Span(0, 5, TokenSource.COMPUTED, Reason.NEVER_SEEN),)))
    with closing(AdminServer(0, AdminCalls(api_key=KEY, explanations=explanations))) as server:
        status, answer = call(server, "GET", path="/explain/a%2Fb")
        assert (status, answer["by_reason"]) == (200, {"never_seen": 5})
        assert [one["id"] for one in call(server, "GET", path="/explain")[1]["requests"]] == ["c", "a/b"]
        assert [one["id"] for one in call(server, "GET", path="/explain?last=1")[1]["requests"]] == ["c"]
        assert call(server, "GET", path="/explain/z")[0] == 404
        for last in ("0", "x", "1001", "000000001" + "0" * 5000):
            assert call(server, "GET", path=f"/explain?last={last}")[0] == 400, last[:20]
        for method in ("POST", "PUT", "DELETE"):
            assert call(server, method, path="/explain")[0] == 405
        assert call(server, "GET", path="/explain", key="wrong")[0] == 401
        assert call(server, "GET", path=PATH)[0] == 404, "this one has no storage to show"
    with closing(AdminServer(0, AdminCalls(explanations=explanations))) as server:
        status, answer = call(server, "GET", path="/explain")
        assert status == 403 and "explanations need one" in answer["message"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 202),
        ({"Host": "localhost:1"}, 202),
        ({"Host": "evil.example"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
    ],
)
def test_without_a_key_no_web_page_may_ask(headers: dict[str, str], status: int, asked: Asked) -> None:
    server = AdminServer(0, AdminCalls(lambda *what: asked.append(what), dict))
    try:
        asking = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        asking.request("DELETE", PATH, headers=headers)
        assert asking.getresponse().status == status and bool(asked) is (status == 202)
    finally:
        server.close()


def test_one_storage_order_at_a_time_and_the_last_word_counts() -> None:
    """Two orders at once would end in either order, and differently on each worker."""
    role = MiniVLLM(World(num_workers=2)).role

    def ordered() -> list[str | None]:
        return [order.name for order in role.step([], lambda request_id: []).storage]

    role.storage.ask("first", {})
    role.storage.ask("second", {})
    assert ordered() == ["second"]
    role.storage.ask("third", {})
    role.storage.ask(None, {})
    assert ordered() == [] and not role.has_storage
    answer = StorageSwitched(1, True)
    role.apply([answer])
    assert ordered() == [], "one worker is still at it"
    role.apply([answer])
    assert role.has_storage
    assert ordered() == [None] and not role.has_storage
    assert ordered() == []


def test_a_store_is_told_of_the_host_pools_beside_the_models_thread() -> None:
    """Registering hundreds of gigabytes takes seconds, and steps take the role's lock."""
    rank = MiniVLLM(World()).ranks[0]
    told: list[bool] = []

    def steps() -> None:
        if rank.role._lock.acquire(blocking=False):
            rank.role._lock.release()
            told.append(True)

    def register(memory: memoryview) -> None:
        if not told:  # as a guard: once
            step = threading.Thread(target=steps)
            step.start()
            step.join()
            assert told, "the model's thread waits"

    rank.storage.parts[0].register = register  # type: ignore[attr-defined]
    rank.role.switch.open_storage = lambda name, keys, label: rank.storage  # type: ignore[assignment,return-value]
    rank.role.attach("fake", {})
    assert told == [True]


@pytest.mark.parametrize("failure", [OSError("no such folder"), MemoryError()])
def test_an_order_that_fails_is_answered_and_the_next_one_done(failure: Exception) -> None:
    vllm = MiniVLLM(World())

    def fail_once(name: str, keys: Mapping[str, Any], label: str) -> Any:
        switch.open_storage = vllm.ranks[0]._open
        raise failure

    switch = vllm.ranks[0].role.switch
    switch.open_storage = fail_once
    for _ in range(2):
        vllm.role.storage.ask("fake", {})
        vllm.step()
    vllm.run(lambda: vllm.role.has_storage)


def test_storage_comes_and_goes_between_steps() -> None:
    vllm = MiniVLLM(World(num_workers=2, keeps_storage=True))
    for rank in vllm.ranks:
        rank.storage.pages = {}

    def asks(name: str | None) -> None:
        vllm.role.storage.ask(name, {})
        vllm.step()
        vllm.run(lambda: vllm.role.has_storage is (name is not None))

    vllm.add(request("a", 3))
    vllm.drain()
    asks("fake")
    vllm.add(request("b", 3, first=40))
    vllm.drain()
    assert vllm.role.figures.stored_pages == 3
    asks(None)
    vllm.add(request("c", 3, first=80))
    vllm.drain()
    assert vllm.role.figures.stored_pages == 3
    asks("fake")
    vllm.role.reset()
    vllm.add(request("d", 3, first=40))
    vllm.drain()
    assert vllm.hit_tokens == 3 * S and vllm.role.prefetch_figures.read == 3


# -- wishes -----------------------------------------------------------------------------------


def test_wishes_are_answered_on_the_same_port_with_the_key_alone() -> None:
    wished: list[object] = []

    def ask(do: Any) -> Any:
        wished.append(do)
        raise TimeoutError("no turn")

    for key, codes in ((KEY, (503, 401)), (None, (403, 403))):
        server = AdminServer(0, AdminCalls(api_key=key, intents=IntentApi(ask)))
        try:
            assert call(server, "GET", path="/hicache/tenants?all")[0] == codes[0]
            assert call(server, "GET", path="/hicache/tenants", key="another")[0] == codes[1]
            assert call(server, "POST", {}, path="/hicache/intents", key="another")[0] == codes[1]
            assert call(server, "GET")[0] == 404, "no storage of this listener's"
        finally:
            server.close()
    assert len(wished) == 1


def test_a_bad_wish_says_which_field(server: AdminServer) -> None:
    assert call(server, "GET", path="/hicache/intents")[0] == 404, "no wishes of this listener's"
    other = AdminServer(0, AdminCalls(api_key=KEY, intents=IntentApi(lambda do: do(None))))
    try:
        status, answer = call(other, "POST", {"selector": {"tokens": ["x"]}}, path="/hicache/prefix/locate")
        assert (status, answer["field"]) == (400, "selector.tokens")
        assert call(other, "DELETE", path="/hicache/tenants")[0] == 405
    finally:
        other.close()
