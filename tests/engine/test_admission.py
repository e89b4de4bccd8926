"""The scheduler's dealings with the lower tiers, on a scripted cache: prefetch, gates, failed loads."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hiradix.apps.engine import Engine, RequestError, SamplingParams, Scope
from hiradix.apps.engine.tensor_parallel import LoadGates
from hiradix.config import HiCacheConfig
from hiradix.transfer import LayerDoneCounter, LoadFailed
from hiradix.tree.key import ADAPTER
from tests.engine.checkpoints import Reference, prompts
from tests.engine.conftest import MakeEngine
from tests.engine.doubles import NoReuse
from tests.engine.driving import assert_empty, drain

PAGES = HiCacheConfig(page_size=16)
GREEDY = SamplingParams(max_new_tokens=8)


class ScriptedTiers(NoReuse):
    """No reuse, and lower tiers that do as they are told."""

    enable_storage = True

    def __init__(self, params: Any, device_pool: Any):
        super().__init__(params)
        self.device_pool = device_pool
        self.layer_done_counter = self
        self.held_back: set[str] = set()  # requests whose prefetch is under way
        self.gates: deque[int] = deque()  # answers of ready_to_load_host_cache
        self.consumers: list[tuple[int, ...]] = []
        self.failed_slots: set[int] = set()
        self.prefetched: dict[str, list[int]] = {}
        self.released: list[str] = []
        self.num_ticks = 0

    def check_hicache_events(self) -> None:
        self.num_ticks += 1

    def ready_to_load_host_cache(self) -> int:
        return self.gates.popleft() if self.gates else -1

    def set_consumer(self, *indices: int) -> None:
        self.consumers.append(indices)

    def error(self, index: int) -> str | None:
        return "the copy failed" if index in self.failed_slots else None

    def prefetch_from_storage(
        self, req_id: str, last_host_node: object, new_input_tokens: Sequence[int], *, req: Any = None
    ) -> bool:
        assert list(req.fill_ids)[:-1] == list(new_input_tokens)
        self.prefetched[req_id] = list(new_input_tokens)
        return True

    def check_prefetch_progress(self, req_id: str) -> bool:
        return req_id not in self.held_back

    def is_prefetch_done(self, req_id: str) -> bool:
        return req_id not in self.held_back

    def pop_prefetch_loaded_tokens(self, req_id: str) -> int:
        return 0

    def release_aborted_request(self, req_id: str) -> None:
        self.held_back.discard(req_id)
        self.released.append(req_id)


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine(
        cache=PAGES,
        max_total_tokens=512,
        chunked_prefill_size=64,
        build_cache=lambda config, params, pool, model: ScriptedTiers(params, pool),
    )


@pytest.fixture
def tiers(engine: Engine) -> ScriptedTiers:
    assert isinstance(engine.cache, ScriptedTiers)
    return engine.cache


def test_arrival_asks_storage_for_all_that_may_be_reused(engine: Engine, tiers: ScriptedTiers) -> None:
    engine.add_request("a", [7, 8, 9], GREEDY, Scope(cache_salt="tenant"))
    assert tiers.prefetched == {"a": [7, 8]}


def test_waiting_for_a_prefetch_is_passed_over(
    engine: Engine, tiers: ScriptedTiers, llama: Reference
) -> None:
    asked = prompts([40, 20], seed=1)
    tiers.held_back.add("slow")
    engine.add_request("slow", asked[0], GREEDY)
    engine.add_request("fast", asked[1], GREEDY)
    answers: dict[str, list[int]] = {"slow": [], "fast": []}
    while len(answers["fast"]) < 8:
        for output in engine.step():
            answers[output.rid] += output.token_ids
    assert answers["slow"] == []
    engine.step()
    assert engine.is_blocked and engine.has_work and not engine.is_idle()
    tiers.held_back.clear()
    answers["slow"] = drain(engine)["slow"].token_ids
    llama.judge(asked, [answers["slow"], answers["fast"]]).assert_holds()


def test_abort_while_waiting_for_a_prefetch(engine: Engine, tiers: ScriptedTiers) -> None:
    tiers.held_back.add("a")
    engine.add_request("a", [1, 2, 3], GREEDY)
    engine.step()
    assert engine.abort("a")
    assert [output.finish_reason for output in engine.step()] == ["abort"]
    assert tiers.released == ["a"]
    assert_empty(engine)


def test_every_step_ticks(engine: Engine, tiers: ScriptedTiers) -> None:
    engine.step()
    engine.add_request("a", [1, 2, 3], SamplingParams(max_new_tokens=3))
    drain(engine)
    assert tiers.num_ticks == 4


def test_pass_waits_for_every_load_that_may_be_under_way(engine: Engine, tiers: ScriptedTiers) -> None:
    tiers.held_back.add("a")
    engine.add_request("a", [1, 2, 3], SamplingParams(max_new_tokens=3))
    tiers.gates.extend([4, 4, 5])
    engine.step()
    engine.step()
    assert tiers.consumers == []  # no pass yet: the gates are remembered
    tiers.held_back.clear()
    engine.step()
    assert tiers.consumers == [(4, 5)]
    tiers.gates.extend([5, -1])
    engine.step()
    engine.step()
    assert tiers.consumers == [(4, 5), (5,), ()]


class FailingGate:
    """A pool getter that raises LoadFailed at the chosen passes' second layer."""

    def __init__(self, pool: Any, failing: set[int]):
        self._get = pool.get_key_buffer
        self._failing = failing
        self.num_passes = 0

    def __call__(self, layer: int) -> torch.Tensor:
        self.num_passes += layer == 0
        if layer == 1 and self.num_passes in self._failing:
            raise LoadFailed("the copy failed")
        buffer: torch.Tensor = self._get(layer)
        return buffer


@pytest.mark.parametrize("failing", [{1}, {1, 2, 3}, {4}, {4, 5, 7}])
def test_failed_load_costs_time_and_nothing_else(
    failing: set[int], engine: Engine, tiers: ScriptedTiers, llama: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = FailingGate(tiers.device_pool, failing)
    monkeypatch.setattr(tiers.device_pool, "get_key_buffer", gate)
    asked = prompts([40, 90, 21], seed=7)
    answers: dict[str, list[int]] = {str(i): [] for i in range(3)}
    for index, prompt in enumerate(asked):
        engine.add_request(str(index), prompt, GREEDY)
        for _ in range(2):
            for output in engine.step():
                answers[output.rid] += output.token_ids
    for rid, answer in drain(engine).items():
        answers[rid] += answer.token_ids
    assert gate.num_passes > max(failing)
    llama.judge(asked, list(answers.values())).assert_holds()
    assert engine.info().num_retractions == 0
    assert_empty(engine)


def test_failed_load_is_waited_for_once_and_loads_beside_it_still_are(
    engine: Engine, tiers: ScriptedTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers.device_pool, "get_key_buffer", FailingGate(tiers.device_pool, {1}))
    tiers.held_back.add("a")
    engine.add_request("a", [1, 2, 3], SamplingParams(max_new_tokens=2))
    tiers.gates.extend([4, 5])
    engine.step()
    tiers.held_back.clear()
    tiers.failed_slots.add(4)
    assert engine.step() == []  # the pass failed: its request waits again
    tiers.gates.append(5)
    engine.step()
    assert tiers.consumers == [(4, 5), (5,)]
    drain(engine)
    assert_empty(engine)


@pytest.mark.parametrize("value", ["\ud800", 7, b"x", ("a",)], ids=ascii)
@pytest.mark.parametrize("field", ["extra_key", "cache_salt"])
def test_whose_cache_it_is_must_be_text(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=f"^{field}="):
        Scope(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "field, value", [("priority", 1.5), ("priority", "high"), ("priority", 2**31), ("hint", "stay")]
)
def test_what_its_pages_matter_is_checked_before_it_is_queued(field: str, value: object) -> None:
    """Found: the engine's thread ended by the TypeError or ValueError, and with it all requests."""
    with pytest.raises(RequestError, match=f"^{field}="):
        Scope(**{field: value})  # type: ignore[arg-type]
    assert Scope(priority=-3, hint="keep_alive").priority == -3


def test_no_client_names_what_adapters_of_other_engines_have_in_the_same_store() -> None:
    with pytest.raises(RequestError, match="^extra_key="):
        Scope(extra_key=f"{ADAPTER}sql@{'0' * 32}")
    assert Scope(extra_key="\0x").extra_key == "\0x" and Scope(cache_salt=f"{ADAPTER}sql").extra_key is None


def test_a_pass_whose_wait_gave_up_counts_for_nothing_though_the_load_ends_well() -> None:
    """Its deadline is 0 s, which have passed at once; the copy ends before anybody asks how the pass went."""
    gate = LayerDoneCounter(1, timeout_s=0.0)
    gates, slot = LoadGates(gate, None), gate.update_producer()
    gates.add(slot)

    def forward(_: object) -> torch.Tensor:
        try:
            gate.wait_until(0)
        finally:
            if gate.is_open(slot):
                gate.layer_done(slot, 0)
                gate.end(slot)
        return torch.ones(1)

    assert gates.run(forward, ()) is None
    assert gate.error(slot) is None and gate.gave_up(slot) is not None
    assert gates.is_waiting and gates.run(forward, ()) is not None, "its readers wait again, and are served"
