"""`hiradix tour`: the route that one page takes through the code, as it is today.

A request with a prompt of one page, and later a second one with the same prompt, go through the real cache in
all three tiers: small pools in main memory and a `disk` store in a temporary folder. A stand-in for a model
computes the page. Each call into hiradix is counted, on every thread, and printed step by step. docs/tour.md
tells the same eight steps in words; a test compares the two.

`--json` prints one object with the steps in order. Each has its calls, files, classes, crossings (calls from
one file into another) and its route: per thread, the modules in the order of their first call.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import hiradix
from hiradix.config import ExtraConfig, HiCacheConfig
from hiradix.errors import CacheError
from hiradix.memory import DevicePool, KVShape, ReqToTokenPool, SlotAllocator
from hiradix.policy.eviction import eviction_policies
from hiradix.prefix_cache import (
    CacheInitParams,
    EvictParams,
    LockReceipt,
    MatchPrefixParams,
    ModelIdentity,
    RadixKey,
    build_prefix_cache,
)
from hiradix.tree import key as tree_key

PAGE = 16  # tokens
POOL_PAGES = 4  # of the device and of the host
WAIT_S = 30.0

SOURCE = Path(hiradix.__file__).parent

STEPS = (
    "The page is computed on the device",
    "It enters the tree",
    "It is written through to the host",
    "It is backed up to storage",
    "It is evicted",
    "It is prefetched for the next request",
    "It is loaded back to the device",
    "The next request uses it",
)


@dataclass(frozen=True)
class TracedCall:
    """One call of a function of hiradix.

    crosses: the caller is in another file of hiradix. owner: the class that the function belongs to.
    """

    step: int
    thread: str
    module: str
    function: str
    crosses: bool

    owner: str | None

    @classmethod
    def of(cls, step: int, thread: str, module: str, qualname: str, crosses: bool) -> TracedCall:
        first, _, rest = qualname.partition(".")
        owner = f"{module}.{first}" if rest and not rest.startswith("<locals>") else None
        return cls(step, thread, module, qualname.replace(".<locals>", ""), crosses, owner)


class Recorder:
    """Notes each call into hiradix while a step is on, on every thread that was started under `watching`."""

    def __init__(self) -> None:
        self.calls: list[TracedCall] = []
        self.step: int | None = None
        self._scheduler = threading.current_thread()
        self._modules: dict[str, str | None] = {}  # by file name

    @contextmanager
    def watching(self) -> Iterator[None]:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    @contextmanager
    def during(self, step: int) -> Iterator[None]:
        self.step = step
        try:
            yield
        finally:
            self.step = None

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        step = self.step
        if step is None or event != "call":
            return
        module = self._module(frame)
        name = frame.f_code.co_qualname
        if module is None or name.endswith("comp>") or name.endswith(("<genexpr>", "<lambda>")):
            return
        caller = None if frame.f_back is None else self._module(frame.f_back)
        crosses = caller is not None and caller != module
        thread = threading.current_thread()
        shown = "scheduler" if thread is self._scheduler else thread.name
        self.calls.append(TracedCall.of(step, shown, module, name, crosses))

    def _module(self, frame: FrameType) -> str | None:
        """The dotted name of the frame's module; None outside of hiradix, and in this module."""
        path = frame.f_code.co_filename
        if path not in self._modules:
            self._modules[path] = None
            if Path(path).is_relative_to(SOURCE) and path != __file__:
                inside = Path(path).relative_to(SOURCE.parent).with_suffix("")
                self._modules[path] = ".".join(part for part in inside.parts if part != "__init__")
        return self._modules[path]


@dataclass
class TourRequest:
    """A request as an engine has it: `hiradix.prefix_cache.records.RequestLike`."""

    rid: str
    origin_input_ids: Sequence[int]
    fill_ids: Sequence[int]
    last_node: Any
    swa_uuid_for_lock: LockReceipt
    prefix_indices: torch.Tensor
    cache_protected_len: int
    output_ids: Sequence[int] = ()
    req_pool_idx: int = 0
    extra_key: str | None = None

    def pop_committed_kv_cache(self) -> int:
        return len(self.fill_ids)


class TinyEngine:
    """The least of an engine: pools, a table of slots, and a forward pass with made-up keys and values."""

    def __init__(self, folder: Path, eviction_policy: str) -> None:
        shape = KVShape(num_layers=2, num_kv_heads=2, head_dim=8, v_head_dim=8, dtype=torch.float32)
        self.pool = DevicePool(shape, POOL_PAGES, PAGE)
        self.slots = SlotAllocator(POOL_PAGES * PAGE, PAGE, "cpu", self.pool)
        self.rows = ReqToTokenPool(2, POOL_PAGES * PAGE)
        extra = {
            "disk_storage_path": str(folder), "max_size": "16MiB", "min_free_space": 0, "deadline_s": WAIT_S,
            "prefetch_threshold": PAGE,
        }  # fmt: skip
        config = HiCacheConfig(
            page_size=PAGE,
            enable_hierarchical_cache=True,
            hicache_ratio=1.0,
            hicache_storage_backend="disk",
            hicache_storage_prefetch_policy="wait_complete",  # however slow the machine is
            hicache_storage_backend_extra_config=ExtraConfig.from_mapping(extra),
        )
        params = CacheInitParams(False, self.rows, self.slots, PAGE, eviction_policy=eviction_policy)
        self.cache = build_prefix_cache(config, params, self.pool, ModelIdentity("tour"))
        self._news = threading.Event()
        self.cache.set_wakeup(self._news.set)

    def admit(self, rid: str, tokens: Sequence[int]) -> TourRequest:
        """Match the prompt, load back what the host has of it, and lock the prefix that was found."""
        found = self.cache.match_prefix(MatchPrefixParams(RadixKey(list(tokens))))
        slots, node = found.device_indices, found.last_device_node
        if found.host_hit_length:
            loaded, node = self.cache.init_load_back(found.last_host_node, found.host_hit_length)
            slots = torch.cat([slots, loaded])
        receipt = self.cache.inc_lock_ref(node)
        return TourRequest(rid, tokens, tokens, node, receipt, slots, len(slots))

    def forward(self, request: TourRequest) -> None:
        """Compute what the prompt has beyond its prefix; read all of it layer by layer, as attention does."""
        num_known, num_tokens = len(request.prefix_indices), len(request.origin_input_ids)
        needed = -(-(num_tokens - num_known) // PAGE) * PAGE
        new = self.slots.alloc(needed)
        row = self.rows.alloc(1)
        if new is None or row is None:
            raise CacheError(f"no room for {needed} tokens")
        (request.req_pool_idx,) = row
        slots = torch.cat([request.prefix_indices, new])[:num_tokens]
        self.rows.write((request.req_pool_idx, slice(0, num_tokens)), slots.to(torch.int32))
        tokens = torch.tensor(request.origin_input_ids)
        for layer in range(self.pool.shape.num_layers):
            expected = (tokens + 1000 * layer).to(torch.float32).view(-1, 1, 1)
            for buffer in self.pool.get_kv_buffer(layer):  # waits until this layer has been loaded
                buffer[slots[num_known:]] = expected[num_known:]
                if not bool((buffer[slots] == expected).all()):
                    raise CacheError("a cached page is not what was computed")

    def finish(self, request: TourRequest) -> None:
        """Give the request's pages to the tree."""
        self.cache.cache_finished_req(request)
        self.rows.free(request.req_pool_idx)

    def start_copies(self) -> int:
        """Start the copies that were ordered: loads, and the write-through of earlier steps."""
        return self.cache.ready_to_load_host_cache()

    def step_until(self, is_done: Callable[[], bool]) -> None:
        """Begin one scheduler step after another, each when a transfer has ended."""
        while not is_done():
            self._await_news()
            self.cache.check_hicache_events()

    def _await_news(self) -> None:
        if not self._news.wait(WAIT_S):
            raise CacheError(f"no transfer has ended within {WAIT_S:g} s")
        self._news.clear()

    def await_copy(self) -> None:
        """Wait for the copy that was started, without applying it: the next step does that."""
        if not self._news.wait(WAIT_S):
            raise CacheError(f"no copy has ended within {WAIT_S:g} s")

    def rest(self) -> None:
        """Let everything under way end."""
        if not self.cache.drain(WAIT_S):
            raise CacheError(f"transfers did not end within {WAIT_S:g} s")
        self._news.clear()


def walk(folder: Path, eviction_policy: str = "lru") -> list[TracedCall]:
    """Take the tour in a store below `folder`: all calls into hiradix, in their order."""
    if not hasattr(tree_key.RadixKey.page_aligned, "__code__"):
        raise CacheError("the compiled form has no calls to show: run this from the source tree")
    recorder = Recorder()
    with recorder.watching():
        engine = TinyEngine(folder, eviction_policy)
        try:
            _take_steps(engine, recorder)
        finally:
            engine.cache.close()
    return recorder.calls


def _take_steps(engine: TinyEngine, recorder: Recorder) -> None:
    cache, prompt = engine.cache, [*range(PAGE), 99]
    warm_up = engine.admit("warm-up", [5] * (PAGE + 1))  # starts the threads, and the store's first file
    engine.forward(warm_up)
    engine.finish(warm_up)
    engine.start_copies()
    engine.rest()

    with recorder.during(1):
        first = engine.admit("first", prompt)
        engine.forward(first)
    with recorder.during(2):
        engine.finish(first)
    with recorder.during(3):
        engine.start_copies()
        engine.await_copy()
    with recorder.during(4):
        engine.step_until(lambda: not cache.ongoing_backup and not cache.ongoing_write_through)
    engine.rest()

    with recorder.during(5):
        cache.evict(EvictParams(POOL_PAGES * PAGE))
    other = engine.admit("other", [7] * (POOL_PAGES * PAGE))
    engine.forward(other)
    with recorder.during(5):
        engine.finish(other)  # its write-through needs the host's room
    engine.start_copies()
    engine.rest()
    cache.evict(EvictParams(POOL_PAGES * PAGE))

    with recorder.during(6):
        found = cache.match_prefix(MatchPrefixParams(RadixKey(prompt)))
        behind = len(found.device_indices) + found.host_hit_length
        cache.prefetch_from_storage("second", found.last_host_node, prompt[behind:])
        engine.step_until(lambda: cache.check_prefetch_progress("second"))
        if cache.pop_prefetch_loaded_tokens("second") != PAGE:
            raise CacheError("storage did not give the page back")
    with recorder.during(7):
        second = engine.admit("second", prompt)
        cache.controller.layer_done_counter.set_consumer(engine.start_copies())
    with recorder.during(8):
        engine.forward(second)
        engine.finish(second)
    engine.rest()


# -- what was seen ------------------------------------------------------------------------------


def summary(calls: Sequence[TracedCall]) -> list[dict[str, Any]]:
    """The output of `--json`, a record for each step."""
    return [
        {"step": number, "title": title, **_figures([c for c in calls if c.step == number])}
        for number, title in enumerate(STEPS, 1)
    ]


def _figures(calls: Sequence[TracedCall]) -> dict[str, Any]:
    return {
        "calls": len(calls),
        "files": len({call.module for call in calls}),
        "classes": len({call.owner for call in calls} - {None}),
        "crossings": sum(call.crosses for call in calls),
        "route": _route(calls),
    }


def _route(calls: Sequence[TracedCall]) -> list[dict[str, Any]]:
    """Per thread the modules, and in each its functions, in the order of their first calls."""
    counts: dict[str, dict[str, dict[str, int]]] = {}
    for call in calls:
        functions = counts.setdefault(call.thread, {}).setdefault(call.module, {})
        functions[call.function] = functions.get(call.function, 0) + 1
    return [
        {"thread": thread, "module": module, "functions": functions}
        for thread, modules in counts.items()
        for module, functions in modules.items()
    ]


def _print(steps: Sequence[dict[str, Any]], whole: dict[str, Any]) -> None:
    for step in steps:
        print(f"{step['step']}. {step['title']}: {_line(step)}")
        thread = None
        for stay in step["route"]:
            if stay["thread"] != thread:
                thread = stay["thread"]
                print(f"   {thread}")
            shown = ", ".join(
                name + (f" x{count}" if count > 1 else "") for name, count in stay["functions"].items()
            )
            print(f"     {stay['module'].removeprefix('hiradix.'):28} {shown}")
        print()
    print(f"All steps: {_line(whole)}")


def _line(figures: dict[str, Any]) -> str:
    return ", ".join(f"{figures[name]} {name}" for name in ("calls", "files", "classes", "crossings"))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("hiradix tour", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument(
        "--eviction-policy", choices=eviction_policies(), default="lru", help="default: lru, the shortest"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        calls = walk(Path(folder), given.eviction_policy)
    steps, whole = summary(calls), _figures(calls)
    del whole["route"]
    if given.json:
        print(json.dumps({"steps": steps, "all": whole}, indent=2))
    else:
        _print(steps, whole)
    return 0


if __name__ == "__main__":
    sys.exit(main())
