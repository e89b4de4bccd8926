"""Checkpoints are written once per session and shared by all engine tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hiradix.apps.engine import Engine, EngineConfig
from hiradix.memory import HostPool
from hiradix.prefix_cache import lower_tiers
from hiradix.storage import PageFingerprint, Trust
from tests.engine.checkpoints import Reference, write_checkpoint, write_tokenizer
from tests.engine.configs import TIERED
from tests.engine.doubles import build_no_reuse

MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="session", autouse=True)
def one_quiet_thread() -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """Reference of a family by name, made on first use."""
    root = tmp_path_factory.mktemp("checkpoints")
    made: dict[str, Reference] = {}

    def get(family: str) -> Reference:
        if family not in made:
            folder: Path = root / family
            write_checkpoint(family, folder)
            if family == "llama":
                write_tokenizer(folder)
            made[family] = Reference.load(folder)
        return made[family]

    return get


@pytest.fixture
def llama(reference: Callable[[str], Reference]) -> Reference:
    return reference("llama")


@pytest.fixture
def make_engine(llama: Reference) -> Iterator[MakeEngine]:
    """Checked engines on the tiny Llama by EngineConfig fields; no reuse unless `build_cache` is given."""
    engines: list[Engine] = []

    def make(**fields: object) -> Engine:
        build_cache = fields.pop("build_cache", build_no_reuse)
        path = fields.pop("model_path", str(llama.path))
        engine = Engine(EngineConfig(path, check=True, **fields), build_cache=build_cache)  # type: ignore[arg-type]
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def lfm2(reference: Callable[[str], Reference]) -> Reference:
    """Layers 0 and 2 keep the last two inputs of a convolution, layers 1 and 3 see all tokens."""
    return reference("lfm2")


@pytest.fixture
def gemma(reference: Callable[[str], Reference]) -> Reference:
    """Layers 0 and 2 see 24 tokens, layers 1 and 3 all of them."""
    return reference("gemma3")


@pytest.fixture
def make_recurrent(make_engine: MakeEngine, lfm2: Reference) -> MakeEngine:
    return tiered(make_engine, lfm2, max_mamba_cache_size=24)


@pytest.fixture
def make_hybrid(make_engine: MakeEngine, gemma: Reference) -> MakeEngine:
    return tiered(make_engine, gemma, swa_full_tokens_ratio=0.5)


def tiered(make_engine: MakeEngine, model: Reference, **own: object) -> MakeEngine:
    """Engines with a host tier, and device pools that do not hold the workload."""

    def make(**fields: object) -> Engine:
        sizes: dict[str, object] = {
            "model_path": str(model.path), "cache": TIERED, "max_total_tokens": 384,
            "chunked_prefill_size": 32, **own,
        }  # fmt: skip
        return make_engine(**{**sizes, **fields})

    return make


@pytest.fixture
def host_pools(monkeypatch: pytest.MonkeyPatch) -> list[HostPool]:
    return recorded_host_pools(monkeypatch)


def recorded_host_pools(monkeypatch: pytest.MonkeyPatch) -> list[HostPool]:
    """The host pools of the engines made from here on, in order: the backbone's before the windows'."""
    pools: list[HostPool] = []

    class Recorded(HostPool):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            pools.append(self)

    monkeypatch.setattr("hiradix.prefix_cache.lower_tiers.HostPool", Recorded)
    return pools


@dataclass
class Openings:
    """Stores that were opened, in order: the fingerprints of each one's components, and what it trusts."""

    fingerprints: list[tuple[PageFingerprint, ...]] = field(default_factory=list)
    trusts: list[Trust] = field(default_factory=list)


def recorded_openings(monkeypatch: pytest.MonkeyPatch) -> Openings:
    found, real = Openings(), lower_tiers.trusted_stores

    def recorded(stores: Any, components: Any, trust: Trust) -> Any:
        codec = "rounded" if trust.rounds else ""
        marks = tuple(replace(component.fingerprint, codec=codec) for component in components)
        found.fingerprints.append(marks)
        found.trusts.append(trust)
        return real(stores, components, trust)

    monkeypatch.setattr(lower_tiers, "trusted_stores", recorded)
    return found


@pytest.fixture
def openings(monkeypatch: pytest.MonkeyPatch) -> Openings:
    """Of the stores that are opened from here on."""
    return recorded_openings(monkeypatch)
