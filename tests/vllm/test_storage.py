"""Storage behind a real vLLM: restarts, kinds of stores, stores that fail, one store for two engines."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hiradix.apps.demo.process import free_port
from hiradix.apps.engine import Engine, EngineConfig, SamplingParams
from hiradix.apps.storage_tools import main as storage_tool
from hiradix.config import ExtraConfig, HiCacheConfig
from tests.engine.driving import serve
from tests.storage_servers.servers import Server, redis_like
from tests.vllm.conftest import REAL
from tests.vllm.play import SETTLE_S
from tests.vllm.player import Player, assert_same, cached, judge
from tests.vllm.test_host import conversation, shared_prefixes

Start = Callable[..., Player]
PROMPTS = [conversation(50 + seed, 300) for seed in range(4)]
PATIENT = {"deadline_s": 60.0}  # a call of storage that a busy disk holds for two seconds is a miss
BY_NAMES = "names"
PAGES = sum((len(prompt) - 1) // 32 for prompt in PROMPTS)


def with_storage(name: str, policy: str = "wait_complete", **keys: Any) -> dict[str, Any]:
    """Extra config with a store that a reset, by which the tests empty the host, leaves as it is.

    What it has goes by names alone: `test_what_storage_has_is_compared_before_it_is_served` is of the rest.
    """
    return {
        "hicache_size": 0.1,
        "hicache_storage_backend": name,
        "hicache_storage_prefetch_policy": policy,
        "hicache_storage_backend_extra_config": {"prefetch_threshold": 32, **PATIENT, **keys},
        "served_model_name": "tiny",
        "drain_timeout_s": 60.0,
        "storage_after_reset": "same",
        "hicache_storage_identity": BY_NAMES,
    }


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Server]:
    server = redis_like("redis-server", tmp_path / "redis").start()
    yield server
    server.kill()


@pytest.mark.parametrize("which", ["tiny", "SmolLM2"])
def test_a_restart_is_served_from_storage(
    start: Start, request: pytest.FixtureRequest, tmp_path: Path, redis: Server, which: str
) -> None:
    """One process with a store of each kind in turn, then another that finds it all."""
    model, plain = (("model", "plain"), ("real_model", "plain_real"))[which == "SmolLM2"]
    engine = REAL if which == "SmolLM2" else {}
    kinds: dict[str, dict[str, Any]] = {
        "disk": {"disk_storage_path": str(tmp_path / "disk"), "max_size": "256MiB", "lock_timeout_s": 60.0},
        "file": {"file_storage_path": str(tmp_path / "file")},
        "redis": {"url": f"redis://127.0.0.1:{redis.port}/0", "timeout_s": 30.0, "connect_timeout_s": 30.0},
    }
    expected = request.getfixturevalue(plain).generate(PROMPTS)
    for found in (0, PAGES):
        extra = with_storage("disk", **kinds["disk"]) | {"hicache_size": 0.3}
        ours = start(extra, request.getfixturevalue(model), **engine)
        for kind, keys in kinds.items():
            if kind != "disk":
                ours.ask("attach", name=kind, keys=PATIENT | keys)
            before = ours.state()
            answers = ours.generate(PROMPTS)
            assert cached(answers) == found * 32, kind
            assert_same(expected, answers)
            after = until(ours, lambda state: state["idle"])
            assert after["fetch_read"] - before["fetch_read"] == found, kind
            assert after["stored_pages"] - before["stored_pages"] == PAGES - found, kind
            assert ours.ask("reset")
        ours.stop()


def test_what_many_requests_want_at_once_is_read_once(start: Start, plain: Player, tmp_path: Path) -> None:
    """Equal prompts, and a system prompt with more clients than run at a time."""
    extra = with_storage("disk", disk_storage_path=str(tmp_path / "disk"), max_size="256MiB")
    system, equal = conversation(7, 5 * 32), conversation(8, 8 * 32 + 1)
    clients = [[*system, *conversation(100 + number, 40)] for number in range(64)]
    expected = plain.generate([equal] * 4), plain.generate(clients, max_tokens=1)
    first = start(extra)
    first.generate([equal, [*system, 5]], max_tokens=1)
    first.settle()
    first.stop()
    ours = start(extra)
    answers = ours.generate([equal] * 4)
    assert_same(expected[0], answers)
    assert [answer["cached"] for answer in answers] == [8 * 32] * 4
    assert ours.state()["read_pages"] == 8
    answers = ours.generate(clients, max_tokens=1)
    assert_same(expected[1], answers)
    assert min(answer["cached"] for answer in answers) == 5 * 32
    assert ours.state()["read_pages"] == 8 + 5


def test_what_is_computed_faster_is_not_read(start: Start, plain: Player, tmp_path: Path) -> None:
    """A store so slow that the first request finds out."""
    extra = with_storage("disk", disk_storage_path=str(tmp_path / "disk"), max_size="256MiB")
    extra["hicache_no_regret"] = "on"
    expected = plain.generate(PROMPTS)
    first = start(extra)
    first.generate(PROMPTS)
    first.settle()
    first.stop()
    ours = start(extra)
    ours.ask("costs", computed_s=1e-6, fetched_s=10.0)
    answers = ours.generate(PROMPTS)
    assert_same(expected, answers)
    state = ours.state()
    assert cached(answers) == 0 == state["read_pages"] and state["fetch_left_out"] == PAGES


def until(ours: Player, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Steps, in which the connector takes in what its workers have done, until its state is as wanted."""
    deadline = time.monotonic() + SETTLE_S
    while not wanted(state := ours.state()):
        assert time.monotonic() < deadline, f"never was as wanted: {state}"
        ours.generate([[5, 6, 7]])
    return state


def test_the_same_weights_run_otherwise_have_pages_of_their_own(
    start: Start, model: Path, tmp_path: Path
) -> None:
    """As with positions that turn more slowly: the files are the same, and no number computed with them."""
    store = with_storage("disk", disk_storage_path=str(tmp_path / "disk"), max_size="64MiB")
    slow = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}
    prompts = [conversation(seed, 200) for seed in range(3)]
    first = start(store)
    as_is = first.generate(prompts)
    first.stop()
    expected = start(None, hf_overrides=slow).generate(prompts)
    assert not judge(expected, as_is).holds
    other = start(store, hf_overrides=slow)
    got = other.generate(prompts)
    assert cached(got) == 0
    assert_same(expected, got)
    other.stop()
    assert cached(start(store, hf_overrides=slow).generate(prompts)) == 3 * 192


def test_what_storage_has_is_compared_before_it_is_served(start: Start, tmp_path: Path) -> None:
    """Two models that say they are the same: as with a hub name whose branch has moved."""
    keys = {"disk_storage_path": str(tmp_path / "disk"), "max_size": "64MiB"}
    extra = with_storage("disk", **keys) | {"hicache_storage_identity": None}
    prompts = [conversation(seed, 200) for seed in range(3)]
    expected = []
    for factor in (1.0, 2.0, 1.0):
        ours = start(extra, enable_prefix_caching=True)
        ours.ask("train", factor=factor, is_paused=True)
        answers = ours.generate(prompts)
        assert cached(answers) == 0, "nothing was computed yet that could be compared"
        until(ours, lambda state: state["idle"])
        assert ours.ask("reset")
        again = ours.generate(prompts)
        assert cached(again) == 3 * 192
        assert_same(answers, again)
        expected.append(answers)
        ours.stop()
    assert not judge(expected[0], expected[1]).holds
    assert_same(expected[0], expected[2])


def test_other_weights_find_nothing_of_the_first_in_any_tier(start: Start, tmp_path: Path) -> None:
    """Changed in place, as by a trainer, then back; another process is started with the first ones."""
    keys = {"disk_storage_path": str(tmp_path / "disk"), "max_size": "64MiB"}
    extra = with_storage("disk", **keys) | {"storage_after_reset": "apart"}
    engine = {"enable_prefix_caching": True}
    prompts = [conversation(seed, 200) for seed in range(3)]
    plain, ours = start(None, **engine), start(extra, **engine)
    expected = []
    for factor, is_paused in ((1.0, True), (2.0, True), (0.5, False)):
        for player in (plain, ours):
            player.ask("train", factor=factor, is_paused=is_paused)
        expected.append(plain.generate(prompts))
        until(ours, lambda state: state["has_storage"])
        got = ours.generate(prompts)
        assert cached(got) == 0
        assert_same(expected[-1], got)
        until(ours, lambda state: state["idle"])
    assert not judge(expected[0], expected[1]).holds
    again = ours.generate(prompts)
    assert cached(again) == 3 * 192
    assert_same(expected[2], again)
    ours.stop()
    got = start(extra, **engine).generate(prompts)
    assert cached(got) == 0, "what was stored since the first change has the names of that process alone"
    assert_same(expected[0], got)


def test_a_store_that_misbehaves_costs_hits_and_nothing_else(start: Start, plain: Player) -> None:
    keys = {"deadline_s": 0.3, "breaker_failures": 1}
    extra = with_storage("naughty", "timeout", prefetch_timeout_base=0.5, **keys)
    ours = start(extra, num_gpu_blocks_override=80)
    prompts = shared_prefixes(24)
    expected = plain.generate(prompts)
    for number, mode in enumerate(("lie", "raise", "hang")):
        if number:
            ours.ask("attach", name="naughty", keys=keys)
        assert ours.ask("reset")
        assert_same(expected, ours.generate(prompts))
        ours.settle()  # what is reset before it is stored is not asked for either
        assert ours.ask("reset")
        read = ours.state()["fetch_read"]
        ours.ask("fault", mode=mode)
        assert_same(expected, ours.generate(prompts))
        state = ours.state()
        assert state["fetch_read"] == read, f"{mode}: nothing of what it gave was taken"
        figures = state["storage"]
        assert figures["breaker_opened"] > 0 or figures.get("get_missed_damaged", 0) > 0, mode
        ours.ask("fault", mode="")


def test_a_store_that_is_killed(start: Start, plain: Player, redis: Server) -> None:
    keys = {"url": f"redis://127.0.0.1:{redis.port}/0", "deadline_s": 0.5, "prefetch_timeout_base": 0.5}
    ours = start(with_storage("redis", "timeout", **keys))
    expected = plain.generate(PROMPTS)
    assert_same(expected, ours.generate(PROMPTS[:2]) + ours.generate(PROMPTS[2:]))
    redis.kill()
    assert ours.ask("reset")
    assert_same(expected, ours.generate(PROMPTS))
    loaded: list[int] = []
    while not loaded or loaded[-1] < PAGES:  # on a busy machine pages still arrive, and nobody waits long
        assert len(loaded) < 5, f"the host tier goes on alone: {loaded}, {ours.state()}"
        until(ours, lambda state: state["idle"])
        before = ours.state()["loaded_pages"]
        assert_same(expected, ours.generate(PROMPTS))
        loaded.append(ours.state()["loaded_pages"] - before)


def admin(port: int, method: str, body: dict[str, str] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    url = f"http://127.0.0.1:{port}/hicache/storage-backend"
    with urllib.request.urlopen(urllib.request.Request(url, data, method=method), timeout=30) as reply:
        answer: dict[str, Any] = json.load(reply)
        return answer


def test_storage_comes_and_goes_while_it_serves(start: Start, plain: Player, tmp_path: Path) -> None:
    """Asked of the admin endpoint, and steps take it up. By default such short prompts are not asked for."""
    port, prompts = free_port(), [prompt[:200] for prompt in PROMPTS]
    ours = start(
        {
            "hicache_size": 0.1, "admin_port": port, "hicache_storage_prefetch_policy": "wait_complete",
            "storage_after_reset": "same", "attach_allow": [f"backend=file,path={tmp_path}"],
        }
    )  # fmt: skip
    expected = plain.generate(prompts)

    def until(name: str, wanted: int) -> None:
        deadline = time.monotonic() + SETTLE_S
        while admin(port, "GET")[name] != wanted:
            assert time.monotonic() < deadline, f"{name} never was {wanted}: {admin(port, 'GET')}"
            ours.generate([[5, 6, 7]])

    assert_same(expected[:2], ours.generate(prompts[:2]))
    ours.settle()  # what comes to the host from now on is stored
    extra = {"file_storage_path": str(tmp_path / "pages"), "prefetch_threshold": 32} | PATIENT
    body = {"hicache_storage_backend": "file", "hicache_storage_backend_extra_config_json": json.dumps(extra)}
    admin(port, "PUT", body)
    until("is_attached", True)
    assert_same(expected[2:], ours.generate(prompts[2:]))
    until("stored_pages", 12)
    assert ours.ask("reset")
    again = ours.generate(prompts)
    assert [answer["cached"] for answer in again] == [0, 0, 192, 192]
    assert_same(expected, again)
    admin(port, "DELETE")
    until("is_attached", False)
    assert ours.ask("reset")
    again = ours.generate(prompts)
    assert cached(again) == 0
    assert_same(expected, again)


def test_one_store_for_two_engines(
    start: Start, plain: Player, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What vLLM wrote the reference engine hits, and back; another page size or model name is a miss."""
    keys = {"file_storage_path": str(tmp_path / "pages")}
    expected = plain.generate(PROMPTS)
    ours = start(with_storage("file", **keys))
    assert_same(expected[:2], ours.generate(PROMPTS[:2]))
    ours.stop()
    back = start(with_storage("file", **keys))  # while the other engine works
    hits, answers = reference_engine(model, tmp_path, PROMPTS, name="tiny", page_size=32)
    assert hits == [288, 288, 0, 0]
    assert answers == [answer["tokens"] for answer in expected]
    again = back.generate(PROMPTS)
    assert [answer["cached"] for answer in again] == [288] * 4, "two of them the other engine wrote"
    assert_same(expected, again)
    for name, size in (("other", 32), ("tiny", 64)):
        hits, _ = reference_engine(model, tmp_path, PROMPTS[:1], name=name, page_size=size)
        assert hits == [0]
    storage_tool(["stat", f"file://{tmp_path / 'pages'}"])
    shown = capsys.readouterr().out
    assert "model_id='other'" in shown or "model_id 'other', not 'tiny'" in shown, shown
    assert "page_size 64, not 32" in shown, shown


def reference_engine(
    model: Path, folder: Path, prompts: list[list[int]], *, name: str, page_size: int, **fields: Any
) -> tuple[list[int], list[list[int]]]:
    """Cached tokens and answers of our own engine over the same store, empty pools."""
    keys = {"file_storage_path": str(folder / "pages"), "prefetch_threshold": 32} | PATIENT
    keys |= {"hicache_storage_identity": BY_NAMES}
    cache = HiCacheConfig(
        page_size=page_size, enable_hierarchical_cache=True, hicache_size=0.1,
        hicache_storage_backend="file", hicache_storage_prefetch_policy="wait_complete",
        hicache_storage_backend_extra_config=ExtraConfig.from_mapping(keys),
    )  # fmt: skip
    engine = Engine(EngineConfig(str(model), model_name=name, max_total_tokens=4096, cache=cache, **fields))
    params = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
    try:
        answers = serve(engine, prompts, params)
        assert engine.drain(30.0)
    finally:
        engine.close()
    hits = [answer.usage.cached_tokens if answer.usage else 0 for answer in answers]
    return hits, [answer.token_ids for answer in answers]
