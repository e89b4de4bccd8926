"""vLLM's calls of the connector that need no engine: sleep, and what its sources are found to have."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed import parallel_state

from hiradix.adapters.probe import installed_sources
from hiradix.adapters.vllm import HiRadixConnector, connector, support
from hiradix.adapters.vllm.layout import Grouping, Interior
from hiradix.adapters.vllm.orders import Orders
from hiradix.adapters.vllm.settings import parse_settings
from hiradix.errors import CacheError
from hiradix.prefix_cache import ModelIdentity
from hiradix.tree import FULL


class Role:
    """A worker role whose copies end, or do not."""

    def __init__(self, ends: bool) -> None:
        self.ends = ends
        self.calls: list[str] = []

    def after_forward(self, orders: Any) -> None:
        self.calls.append("after_forward")

    def settle(self, timeout_s: float) -> bool:
        assert 0 < timeout_s < float("inf")
        self.calls.append("settle")
        return self.ends


def worker_of(role: Role, settles: bool = False) -> Any:
    one = object.__new__(HiRadixConnector)
    one.worker, one._orders, one._settles = SimpleNamespace(role=role), None, settles
    return one


def test_sleep_waits_for_copies_and_is_refused_while_they_run() -> None:
    role = Role(ends=True)
    worker_of(role).unregister_kv_caches()
    assert role.calls == ["settle"]
    with pytest.raises(CacheError, match=r"vLLM cannot sleep: copies of KV still run after 30 s"):
        worker_of(Role(ends=False)).unregister_kv_caches()
    unregistered = worker_of(role)
    unregistered.worker = None
    unregistered.unregister_kv_caches()


@pytest.mark.parametrize("settles", [False, True])
def test_where_vllm_tells_nobody_of_its_sleep_each_step_waits(settles: bool) -> None:
    role = Role(ends=False)
    worker_of(role, settles).wait_for_save()
    assert role.calls == ["after_forward", *["settle"] * settles]


@pytest.mark.parametrize(
    ("given", "is_read"),
    [({}, False), ({"hicache_storage_backend": "file"}, True), ({"admin_port": 0}, True)],
)
def test_weights_are_read_only_where_pages_may_be_stored(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], is_read: bool
) -> None:
    """Each rank reads all of them: over host memory alone that would be a long start for nothing."""
    looked = []

    def identity(*_: Any) -> ModelIdentity:
        looked.append(True)
        return ModelIdentity("m")

    group = SimpleNamespace(rank_in_group=1, world_size=2)
    for name in ("get_tp_group", "get_pp_group"):
        monkeypatch.setattr(parallel_state, name, lambda: group)
    monkeypatch.setattr(connector, "identity_of", identity)
    monkeypatch.setattr(connector, "_interior", lambda *_: Interior.TOKENS)
    spec = SimpleNamespace(dtype="float16", head_size_v=8)
    one: Any = SimpleNamespace(
        _vllm_config=SimpleNamespace(
            model_config=SimpleNamespace(hf_text_config=None, dtype="float16"),
            parallel_config=SimpleNamespace(world_size=4),
        ),
        _kv_cache_config=SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=["l.0"])], num_blocks=4
        ),
        _settings=parse_settings(given, 16),
        _grouping=Grouping(16, (0,), (FULL,)),
    )
    plan = connector.worker_plan(one)
    assert plan.model == ModelIdentity("m" if is_read else "", tp_rank=1, tp_size=2, pp_rank=1, pp_size=2)
    assert bool(looked) is is_read


@pytest.mark.parametrize(
    ("zeroed", "copies"), [([7], None), ([7, 9], [(3, 5)]), (None, [(3, 5)]), (None, None)]
)
def test_blocks_that_vllm_fills_itself_are_written_to(zeroed: Any, copies: Any) -> None:
    """It zeroes those of a request, too, that is preempted by the very step that gave it them: no request of
    the step has them, and a save may still read them."""
    filled: list[int] = []

    def step(scheduled: Any, table: Any, given: Any) -> Orders:
        filled.extend(given)
        return Orders()

    one: Any = object.__new__(connector.HiRadixConnector)
    one._grouping, one._resets, one._turn = Grouping(16, (0,), (FULL,)), connector.ResetWatch(), nullcontext()
    one.scheduler = SimpleNamespace(step=step, quiet_step=lambda rows: Orders())
    output: Any = SimpleNamespace(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=["a"], new_block_ids=[None], num_computed_tokens=[5], resumed_req_ids=set()
        ),
        num_scheduled_tokens={"a": 1},
        kv_connector_block_state=SimpleNamespace(boundary_state_offloads={}, resolve_block_ids=None),
        kv_cache_block_copies=copies,
        new_block_ids_to_zero=zeroed,
    )
    one.build_connector_meta(output)
    assert sorted(filled) == sorted([*(zeroed or ()), *(target for _, target in copies or ())])


def test_the_installed_release_has_all_that_is_used() -> None:
    assert support.lacking(installed_sources("vllm")) == ()
    assert support.installed_version().startswith(support.TESTED)
    assert connector.SETTLE_S == 30.0
