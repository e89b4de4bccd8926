"""What the SGLang adapter says where it cannot serve, without SGLang: versions, flags, pools."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from hiradix.adapters.sglang import plugin
from hiradix.adapters.sglang.cache_factory import build_cache
from hiradix.adapters.sglang.support import Api, api_of, refuse_allocator, refuse_flags, warn_if_untested
from hiradix.errors import ConfigError
from hiradix.memory import HybridSlotAllocator
from hiradix.prefix_cache.allocator_ports import AllocatorPort, HybridPort


def base_class(*abstract: str) -> type:
    return type("BasePrefixCache", (), {"__abstractmethods__": frozenset(abstract)})


def test_the_contract_is_told_by_what_it_asks_for() -> None:
    assert api_of(base_class("reset", "match_prefix", "checkpoint")) is Api.CHECKPOINT
    assert api_of(base_class("reset", "cache_finished_req", "cache_unfinished_req")) is Api.FINISHED_REQ


def test_an_unknown_contract_names_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hiradix.adapters.sglang.support.installed_version", lambda: "9.9.9")
    with pytest.raises(ConfigError, match=r"SGLang 9\.9\.9 is not supported.*Use SGLang 0\.5\.23"):
        api_of(base_class("reset", "something_new"))


def test_an_sglang_without_a_registry_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang.srt.mem_cache.registry", None)
    monkeypatch.setattr("hiradix.adapters.sglang.support.installed_version", lambda: "0.5.9")
    with pytest.raises(ConfigError, match=r"SGLang 0\.5\.9 is not supported: it has no .*registry"):
        plugin.activate()


@pytest.mark.parametrize(
    ("version", "num_told"),
    [
        ("0.5.23", 0),
        ("0.5.23.post1", 0),
        ("0.5.23+cpu", 0),
        ("0.5.15.post1", 0),
        ("0.5.23rc1", 1),
        ("0.5.24.dev3+g01ab", 1),
        ("0.5.24", 1),
        ("0.6", 1),
    ],
)
def test_an_sglang_that_nobody_tested_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str, num_told: int
) -> None:
    monkeypatch.setattr("hiradix.adapters.sglang.support.installed_version", lambda: version)
    warn_if_untested()
    assert [version in record.getMessage() for record in caplog.records] == [True] * num_told


@pytest.mark.parametrize(
    ("missing", "error"),
    [("sglang.srt.mem_cache.base_prefix_cache", ConfigError), ("numpy.none", ModuleNotFoundError)],
)
def test_an_sglang_that_lacks_what_is_imported_is_named(
    monkeypatch: pytest.MonkeyPatch, missing: str, error: type[Exception]
) -> None:
    def build_cache(context: object) -> None:
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr("hiradix.adapters.sglang.cache_factory.build_cache", build_cache)
    monkeypatch.setattr("hiradix.adapters.sglang.support.lacking", lambda read: ())
    monkeypatch.setattr("hiradix.adapters.sglang.support.installed_version", lambda: "9.9.9")
    with pytest.raises(error, match=missing) as refused:
        plugin.make_cache(object())
    assert error is not ConfigError or "SGLang 9.9.9 is not supported" in str(refused.value)


@pytest.mark.parametrize(
    ("registry", "base", "piece"),
    [
        ("", "", r"there is no sglang\.srt\.mem_cache\.registry"),
        ("x = 1", "def insert_req(self): ...", "no checkpoint or cache_finished_req, but for insert_req"),
        ("x = 1", "def checkpoint(self, req, *, up_to): ...", "there is no register_radix_cache_backend"),
        ("x = 1", "def cache_finished_req(self, req): ...", "there is no register_radix_cache_backend"),
    ],
)
def test_an_sglang_that_lacks_what_is_used_is_refused_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch, registry: str, base: str, piece: str
) -> None:
    abstract = f"class BasePrefixCache:\n    @abstractmethod\n    {base}\n" if base else ""
    sources = {"registry": registry, "base_prefix_cache": abstract}
    known = {f"sglang.srt.mem_cache.{name}": text for name, text in sources.items() if text}
    monkeypatch.setattr("hiradix.adapters.sglang.support.installed_sources", lambda name: known.get)
    monkeypatch.setattr("hiradix.adapters.sglang.support.installed_version", lambda: "9.9.9rc1")
    with pytest.raises(ConfigError, match=rf"SGLang 9\.9\.9rc1 is not supported: .*{piece}.*Use SGLang"):
        plugin.make_cache(object())


@pytest.mark.parametrize(
    "attribute",
    [
        "enable_lmcache",
        "enable_flexkv",
        "enable_unified_memory",
        "enable_session_radix_cache",
        "enable_kv_cache_sharding",
    ],
)
def test_an_option_that_cannot_be_served_is_named(attribute: str) -> None:
    flag = "--" + attribute.replace("_", "-")
    with pytest.raises(ConfigError, match=f"^{flag} is not supported with --radix-cache-backend hiradix: "):
        refuse_flags(SimpleNamespace(**{attribute: True}))
    refuse_flags(SimpleNamespace(**{attribute: False}))


def allocator(kind: str, base: type = object) -> type:
    return type(kind, (base,), {})


INTERLEAVED = allocator("PageInterleavePoolAllocator", allocator("PagedTokenToKVPoolAllocator"))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            INTERLEAVED,
            "The allocator PageInterleavePoolAllocator .--enable-kv-cache-sharding. is not supported",
        ),
        (
            allocator("NewPool", INTERLEAVED),
            "The allocator NewPool .--enable-kv-cache-sharding. is not supported",
        ),
        (
            allocator("Striped", allocator("PagedTokenToKVPoolAllocator")),
            "This model's allocator Striped is not",
        ),
        (
            allocator("UnifiedMambaTokenToKVPoolAllocator"),
            "UnifiedMambaTokenToKVPoolAllocator is not supported",
        ),
        (
            allocator("PureSWATokenToKVPoolAllocator", allocator("SWATokenToKVPoolAllocator")),
            "PureSWA.* is not",
        ),
    ],
)
def test_an_allocator_that_may_hand_pages_out_otherwise_is_refused_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch, kind: type, said: str
) -> None:
    for name in ("sglang", "sglang.srt", "sglang.srt.mem_cache"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    contract = ModuleType("base_prefix_cache")
    contract.BasePrefixCache = base_class("checkpoint")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang.srt.mem_cache.base_prefix_cache", contract)
    params = SimpleNamespace(token_to_kv_pool_allocator=kind())
    context = SimpleNamespace(disable_radix_cache=False, server_args=SimpleNamespace(), params=params)
    with pytest.raises(ConfigError, match=said):
        build_cache(context)


@pytest.mark.parametrize(
    "kind", ["TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator", "SWATokenToKVPoolAllocator"]
)
def test_the_known_allocators_are_served(kind: str) -> None:
    refuse_allocator(allocator(kind)())


class Registry(ModuleType):
    """SGLang's registry module, as far as the entry point uses it."""

    def __init__(self) -> None:
        super().__init__("registry")
        self.factories: dict[str, object] = {}

    def registered_radix_cache_backends(self) -> list[str]:
        return list(self.factories)

    def register_radix_cache_backend(self, name: str, factory: object) -> None:
        assert name not in self.factories
        self.factories[name] = factory


def test_activation_registers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry()
    for name in ("sglang", "sglang.srt", "sglang.srt.mem_cache"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.mem_cache.registry", registry)
    plugin.activate()
    plugin.activate()
    assert registry.factories == {"hiradix": plugin.make_cache}


class FreeList:
    """SGLang's paged allocator, whose `free_pages` is a tensor."""

    def __init__(self, num_pages: int, page_size: int):
        self.page_size, self.size, self.device = page_size, num_pages * page_size + 1, "cpu"
        self.free_pages = torch.arange(1, num_pages + 1)

    def available_size(self) -> int:
        return len(self.free_pages) * self.page_size

    def alloc(self, need_size: int) -> torch.Tensor | None:
        count = need_size // self.page_size
        if count > len(self.free_pages):
            return None
        pages, self.free_pages = self.free_pages[:count], self.free_pages[count:]
        return (pages[:, None] * self.page_size + torch.arange(self.page_size)).reshape(-1)

    def free_page_ids(self, page_ids: torch.Tensor) -> None:
        self.free_pages = torch.cat([self.free_pages, page_ids])


def test_pages_of_a_foreign_allocator() -> None:
    allocator = FreeList(4, 8)
    port = AllocatorPort(allocator, 8)
    assert port.size == 32
    pages = port.alloc_pages(3)
    assert pages is not None and pages.tolist() == [1, 2, 3]
    assert port.alloc_pages(2) is None and port.available_size() == 8
    port.free_pages(np.array([3, 1], np.int32))
    assert port.available_size() == 24 and allocator.free_pages.tolist() == [4, 3, 1]


class PagedTokenToKVPoolAllocator(FreeList):
    """The same by the name of SGLang's: freed pages wait in `staged` until they are asked for."""

    def __init__(self, num_pages: int, page_size: int):
        super().__init__(num_pages, page_size)
        self.staged: list[torch.Tensor] = []

    def alloc(self, need_size: int) -> torch.Tensor | None:
        raise AssertionError("slots were made of pages for nothing")

    def free_page_ids(self, page_ids: torch.Tensor) -> None:
        self.staged.append(page_ids)

    def merge_and_sort_free(self) -> None:
        self.free_pages, _ = torch.sort(torch.cat([self.free_pages, *self.staged]))
        self.staged = []


def test_pages_of_sglangs_paged_allocator_are_its_own() -> None:
    allocator = PagedTokenToKVPoolAllocator(5, 8)
    port = AllocatorPort(allocator, 8)
    first = port.alloc_pages(4)
    assert first is not None and first.tolist() == [1, 2, 3, 4] and first.dtype == np.int32
    port.free_pages(np.array([3, 2], np.int32))
    assert port.alloc_pages(4) is None and port.available_size() == 24
    again = port.alloc_pages(3)
    assert again is not None and again.tolist() == [2, 3, 5] and port.available_size() == 0
    port.free_pages(first[:2])
    port.free_pages(np.array([5], np.int32))
    first[:] = 0
    assert port.alloc_pages(3) is not None, "what the allocator was given is read only once"


class StrictHybrid(HybridSlotAllocator):
    """As SGLang's: `free_full` and `free_swa` refuse slots that are not what they say."""

    def free_swa(self, free_index: torch.Tensor) -> None:
        assert (self.full_to_swa_index_mapping[free_index] > 0).all(), "no window slot beside one"
        super().free_swa(free_index)

    def free_full(self, free_index: torch.Tensor) -> None:
        assert (self.full_to_swa_index_mapping[free_index] == 0).all(), "a window slot is left beside one"
        self.full_attn_allocator.free(free_index)


def test_full_slots_are_freed_with_and_without_windows() -> None:
    allocator = StrictHybrid(8 * 4, 8 * 4, 4)
    port = HybridPort(allocator, 4)
    slots = allocator.alloc(16)
    assert slots is not None
    port.free_swa(slots[:8])
    assert (port.full_available_size(), port.swa_available_size()) == (16, 24)
    port.free(slots)
    assert (port.full_available_size(), port.swa_available_size()) == (32, 32)
