"""Storage that is away when a vLLM worker starts: the worker starts, unless it is required."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hiradix.adapters.vllm.layout import Interior, grouping
from hiradix.adapters.vllm.settings import parse_settings
from hiradix.adapters.vllm.worker_factory import BuiltWorker, KVGroup, WorkerPlan, build_worker
from hiradix.config import ExtraConfig
from hiradix.errors import ConfigError, Unreachable
from hiradix.prefix_cache import ModelIdentity
from hiradix.storage import register_storage_backend, registry
from tests.storage import test_joining
from tests.storage.test_joining import until
from tests.vllm_roles.test_layout import BLOCKS, HEADS, FullAttentionSpec, S

SPEC: Any = FullAttentionSpec()


@pytest.fixture(autouse=True)
def down(monkeypatch: pytest.MonkeyPatch) -> Iterator[test_joining.World]:
    test_joining.world = test_joining.World()
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    register_storage_backend("moody", "tests.storage.test_joining:Moody")
    yield test_joining.world


def built(**more: Any) -> BuiltWorker:
    values = {
        "hicache_size": 0.001, "hicache_storage_backend": "moody",
        "hicache_storage_backend_extra_config": {"join_retry_s": 0.01}, **more,
    }  # fmt: skip
    named = [KVGroup(SPEC, ["layers.0.attn"])]
    settings, model = parse_settings(values, S), ModelIdentity("m")
    plan = WorkerPlan(settings, grouping([SPEC]), named, BLOCKS, None, model, 1, Interior.TOKENS)
    return build_worker(plan, {"layers.0.attn": torch.zeros(BLOCKS, HEADS, S, 8)})


def test_a_worker_starts_and_joins_later(down: test_joining.World) -> None:
    made = built()
    try:
        storage = made.role.storage
        assert made.facts.has_storage and storage is not None and not storage.is_joined
        down.fault = None
        until(lambda: storage.is_joined)
        assert down.made[0].registered, "the host pool's memory was told of"
    finally:
        made.role.close(0.0)
    assert down.made[0].is_closed


@pytest.mark.parametrize(
    "more",
    [
        {"hicache_storage_required": True},
        {"hicache_storage_backend_extra_config": {"hicache_storage_required": True}},
    ],
)
def test_where_it_is_required_the_start_ends(more: dict[str, Any]) -> None:
    with pytest.raises(Unreachable, match="moody: ConnectionRefusedError"):
        built(**more)


def test_what_is_said_twice_is_refused() -> None:
    extra = {"hicache_storage_required": False}
    with pytest.raises(ConfigError, match="hicache_storage_required is in .*, too"):
        parse_settings({"hicache_storage_required": True, "hicache_storage_backend_extra_config": extra}, S)
    with pytest.raises(ConfigError, match="hicache_storage_required must be bool"):
        parse_settings({"hicache_storage_required": "yes"}, S)


def test_an_attach_while_serving_is_required_unless_it_says_otherwise() -> None:
    """As orders carry it to workers."""
    for given, asked in ((None, True), (True, True), (False, False)):
        values = {} if given is None else {"hicache_storage_required": given}
        extra = ExtraConfig.from_mapping({"url": "x", **values}).when_serving()
        again = ExtraConfig.from_mapping(extra.opening)
        assert again.hicache_storage_required is asked and dict(again.backend) == {"url": "x"}
