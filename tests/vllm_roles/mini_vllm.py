"""What of vLLM the two roles see, small enough to check: blocks, steps, preemption, loads that fail.

The model writes, for each position, a number made of everything before it, the namespace, the layer and the
worker. Before it computes a position it checks every number it would read, in every layer and group. Blocks
are handed out again at once (last freed, first used), to any KV cache group, and all groups have the same
bytes under a block's number, as in vLLM: so a copy that comes late reads or writes the wrong thing, and is
seen.

A group of recurrent states has no number per position but one state per request, which goes on from block to
block as vLLM's `mamba_cache_mode` align has it: a step's end is in the block that it falls into, steps of a
prompt end where blocks do, a block whose end is passed stays as it is until it is freed, and vLLM says which
block holds which end's state.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np
import torch

from hiradix.adapters.vllm.events import HostEvents
from hiradix.adapters.vllm.layout import Blocks, StateTensors, pool_of, states_of
from hiradix.adapters.vllm.orders import Orders
from hiradix.adapters.vllm.scheduler import SchedulerRole
from hiradix.adapters.vllm.scheduler_plan import Asked, OfferedState, SchedulerPlan, StepRequest
from hiradix.adapters.vllm.switch import Work
from hiradix.adapters.vllm.worker import WorkerRole
from hiradix.cache.host_index import HostIndex
from hiradix.explain import MOST_KEPT, MOST_SHOWN
from hiradix.memory import HostPool, KVShape, TorchTransport
from hiradix.policy.eviction import make_order
from hiradix.policy.prefetch_policy import PrefetchLimits, PrefetchPolicy
from hiradix.policy.write_policy import WritePolicy
from hiradix.prefix_cache import ModelIdentity, stored_pages
from hiradix.storage import Generations, Trust
from hiradix.storage.guard.breaker import NO_TROUBLES
from hiradix.transfer import PoolPair, Runtime, StepDriver, TransferLimits
from hiradix.tree import FULL, Component

S, HEADS, DIM, LAYERS = 4, 1, 1, 2
STATE = StateTensors(
    LAYERS, (((2,), torch.int32), ((3,), torch.float64))
)  # half of a block; the rest is padding


@dataclass(eq=False)
class FakeLora:
    lora_name: str
    lora_path: str
    lora_int_id: int = 1
    load_inplace: bool = False


@dataclass(frozen=True)
class FakeSpan:
    offset: int
    length: int


@dataclass(frozen=True)
class FakeFeature:
    """An image: what it is, and which of the prompt's tokens stand for it."""

    identifier: str
    mm_position: FakeSpan


@dataclass(eq=False)
class FakeRequest:
    """vLLM's Request as far as it is read."""

    request_id: str
    all_token_ids: list[int]
    max_tokens: int
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: Sequence[FakeFeature] = ()
    prompt_embeds: Any = None
    resumable: bool = False
    skip_reading_prefix_cache: bool = False
    num_computed_tokens: int = 0
    num_prompt: int = 0
    tables: list[list[int]] = field(default_factory=list)
    is_loading: bool = False
    weights: int = 0
    next_start: int = 0  # of the step that is being planned
    _numbers: dict[tuple[int, int], int] = field(default_factory=dict)  # tokens are only ever added

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.all_token_ids[: self.num_prompt or None]

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def number(self, position: int) -> int:
        """What the KV of a position is made of: everything before it and what keeps it apart.

        With the weights that its computation began with: what stands behind old KV is of no use to others.
        """
        known = self._numbers.get((self.weights, position))
        if known is None:
            known = self._numbers[self.weights, position] = self._number(position)
        return known

    def _number(self, position: int) -> int:
        images = [image for image in self.mm_features if image.mm_position.offset <= position]
        lora = self.lora_request and self.lora_request.lora_name
        space = f"{self.weights}/{self.cache_salt}/{lora}/{images}".encode(errors="surrogatepass")
        return zlib.crc32(np.array(self.all_token_ids[: position + 1], np.int64).tobytes() + space) % 999_983

    def name(self, page: int) -> Any:
        """What vLLM's own prefix cache knows a page by."""
        lora = self.lora_request and self.lora_request.lora_name
        return tuple(self.all_token_ids[: (page + 1) * S]), self.cache_salt, lora, tuple(self.mm_features)

    @property
    def block_hashes(self) -> list[bytes]:
        return [self.number(end - 1).to_bytes(4, "big") for end in range(S, self.num_tokens + 1, S)]


class CopyFault(Exception):
    """Planted."""


class FaultyTransport(TorchTransport):
    """Copies that fail when told to, half done."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = 0

    def copy_pages(self, src: Any, dst: Any, src_pages: Any, dst_pages: Any, layers: Any = None, /) -> None:
        if self.fails:
            self.fails -= 1
            half = len(src_pages) // 2
            super().copy_pages(src, dst, src_pages[:half], dst_pages[:half], layers)
            raise CopyFault("planted")
        super().copy_pages(src, dst, src_pages, dst_pages, layers)


class FakeStorage:
    """A store that outlives engines, with faults; stands for a guarded backend and its part per component.

    label: begins the names of all pages, as what the worker was told does with a fingerprint.
    """

    def __init__(self, pages: dict[str, bytes], num_components: int = 1, label: str = "") -> None:
        self.pages = pages
        self.label = label
        self.fault = ""
        self.parts = tuple(FakePart(self, "" if c == 0 else f"@{c}") for c in range(num_components))
        self.guards = self.parts

    is_joined = True

    def when_joined(self, call: Callable[[Any], None]) -> None:
        """It is there from the start."""

    def close(self, timeout_s: float = 0.0) -> None:
        """Nothing to let go of."""


class FakePart:
    """The pages of one component, in the store's dictionary under their names and `suffix`."""

    def __init__(self, whole: FakeStorage, suffix: str) -> None:
        self._whole, self._suffix = whole, suffix

    def _name(self, key: str) -> str:
        return self._whole.label + key + self._suffix

    def exists(self, keys: Sequence[str]) -> int:
        if self._whole.fault == "exists":
            return 0
        lacking = (i for i, key in enumerate(keys) if self._name(key) not in self._whole.pages)
        return next(lacking, len(keys))

    wants_computed, troubles, num_adopted = False, NO_TROUBLES, 0
    is_joined, may_read, reads_in_part, is_read_only = True, True, False, False

    def register(self, memory: memoryview) -> bool:
        return False

    def get(self, keys: Sequence[str], into: Sequence[Sequence[memoryview]]) -> list[bool]:
        ok = []
        for number, (key, views) in enumerate(zip(keys, into, strict=True)):
            data = self._whole.pages.get(self._name(key))
            if (
                data is None
                or self._whole.fault == "get nothing"
                or (self._whole.fault == "get" and number >= len(keys) // 2)
            ):
                ok.append(False)
                continue
            for view in views:
                view.cast("B")[:], data = data[: view.nbytes], data[view.nbytes :]
            ok.append(True)
        return ok

    def delete(self, keys: Sequence[str]) -> bool:
        for key in keys:
            self._whole.pages.pop(self._name(key), None)
        return True

    def forget_tenant(self, tenant: str) -> int | None:
        return None

    def forget_behind(self, keys: Sequence[str]) -> int | None:
        return None

    def scrub(self) -> bool:
        return True

    def put(
        self,
        keys: Sequence[str],
        pages: Sequence[Sequence[memoryview]],
    ) -> list[bool]:
        if self._whole.fault == "put":
            return [False] * len(keys)
        for key, views in zip(keys, pages, strict=True):
            self._whole.pages[self._name(key)] = b"".join(bytes(view) for view in views)
        return [True] * len(keys)

    def close(self, timeout_s: float = 0.0) -> None:
        """Nothing to let go of."""


@dataclass(frozen=True)
class World:
    """One configuration. window: of the second KV cache group, 0 for none. store: None, or shared pages.

    compares: whether what storage has is compared before it is served. prefix_cache: whether vLLM has one of
    its own; only without a window. deferred: steps after which loads beside steps are taken up, as vLLM 0.33
    does where steps are under way that may read the blocks.
    """

    num_blocks: int = 24
    host_pages: int = 16
    num_workers: int = 1
    window: int = 0
    load_async: bool = False
    budget: int = 12
    max_running: int = 3
    write_policy: str = "write_through"
    prefetch_policy: str = "wait_complete"
    prefix_cache: bool = False
    keeps_storage: bool = False
    batch_pages: int = 128
    seed: int = 0
    policy: str = "lru"
    tables: str = ""
    compares: bool = False
    deferred: int = 0
    no_regret: bool = False
    states: int = 0
    checkpoints: bool = False
    chunk: int = 0
    late: bool = False
    saves: bool = True
    loads: bool = True

    @property
    def num_attention(self) -> int:
        """KV cache groups of attention; those of states come after them."""
        return 2 if self.window or self.chunk else 1

    def passed(self, num_tokens: int) -> int:
        """Leading positions that the next token does not look at in the second group, of so many computed."""
        if self.chunk:
            return num_tokens // self.chunk * self.chunk
        return max(0, num_tokens - self.window + 1)


class Rank:
    """A worker: device blocks per group, its role, and its view of what the model computes."""

    def __init__(self, world: World, number: int, store: dict[str, bytes] | None) -> None:
        attention = world.num_attention
        shape = KVShape(LAYERS, HEADS, DIM, DIM, torch.float64)
        size = (world.num_blocks, HEADS, S, 2 * DIM)
        self.offset = number * 7
        self.caches = [torch.zeros(size, dtype=torch.float64) for _ in range(LAYERS)]
        self._cells = [cache.numpy()[:, 0] for cache in self.caches]  # the same memory, of one head
        self.driver = StepDriver(world.seed + number)
        groups = attention + world.states
        self.attention = attention
        self.transports = [FaultyTransport() for _ in range(groups)]
        raw = [cache.view(torch.uint8).view(world.num_blocks, 1, 1, -1) for cache in self.caches]
        raw = [one[..., : STATE.num_bytes] for one in raw]
        self._states = [one.numpy()[:, 0, 0] for one in raw]
        pairs = []
        for group, transport in enumerate(self.transports):
            layers = range(group * LAYERS, (group + 1) * LAYERS)
            if group < attention:
                pool, host = pool_of(shape, Blocks(S, world.num_blocks), self.caches), S
            else:
                pool, host = states_of(STATE, world.num_blocks, raw), 1
            pairs.append(PoolPair(pool, HostPool(pool.shape, world.host_pages, host), transport, layers))
        runtime = Runtime(
            self.driver, self.driver.now, TransferLimits(batch_pages=world.batch_pages, num_load_slots=64)
        )
        self.storage = FakeStorage({} if store is None else store, groups)
        hosts = [pair.host for pair in pairs]
        model = ModelIdentity("mini")
        self.stored = [stored_pages(model, host, "", f"{n or ''}", S) for n, host in enumerate(hosts)]
        self.compares = world.compares
        self.page_bytes = [host.page_bytes for host in hosts]
        self.role = WorkerRole(pairs, self._open, runtime)
        self.switching: list[Work] = []  # goes on with `follow`
        self.role.switch.spawn = self.switching.append
        if store is not None:
            self.role.attach("fake", {})

    def _open(self, name: str, keys: Mapping[str, Any], label: str) -> Any:
        self.storage = FakeStorage(self.storage.pages, len(self.storage.parts), label)
        return Generations(self.storage, self.stored, Trust()) if self.compares else self.storage

    def follow(self) -> None:
        """What the worker was told of its storage goes on a step."""
        self.switching[:] = [work for work in self.switching if next(work, "ended") is None]

    def write(self, group: int, block: int, offset: int, number: int) -> None:
        for layer, cells in enumerate(self._cells):
            value = number + self._mark(group, layer)
            cells[block, offset] = value, -value

    def reads_right(self, layer: int, at: tuple[int, int, int], number: int) -> bool:
        group, block, offset = at
        one, other = self._cells[layer][block, offset].tolist()
        return one == number + self._mark(group, layer) and other == -one

    def write_state(self, group: int, block: int, number: int) -> None:
        """The state behind a position: every byte of it."""
        for layer, rows in enumerate(self._states):
            row, value = rows[block], number + self._mark(group, layer)
            row[:8].view(np.int32)[:] = value, -value
            row[8:].view(np.float64)[:] = value, -value, value + 0.5

    def state_is(self, layer: int, group: int, block: int, number: int) -> bool:
        row, value = self._states[layer][block], number + self._mark(group, layer)
        found = [*row[:8].view(np.int32).tolist(), *row[8:].view(np.float64).tolist()]
        return found == [value, -value, value, -value, value + 0.5]

    def _mark(self, group: int, layer: int) -> int:
        return self.offset + layer + group * 10_000_000


class MiniVLLM:
    """vLLM's scheduler and its workers around the roles; `step` is one engine step."""

    def __init__(
        self, world: World, store: list[dict[str, bytes]] | None = None, events: HostEvents | None = None
    ) -> None:
        self.world = world
        behind = (world.chunk or world.window) - 1
        windows = (Component("window", -(-behind // S)),) if behind > 0 else ()
        states = tuple(Component(f"state{n}", 1, per_page=False) for n in range(world.states))
        order = make_order(world.policy, {"tables": world.tables} if world.tables else {})
        self.index = HostIndex(S, (FULL, *windows, *states), order)
        self.groups = tuple(range(1 + len(windows) + len(states)))
        self.now_s = 0.0
        limits = PrefetchLimits(S, threshold_tokens=S)
        self.role = SchedulerRole(
            SchedulerPlan(
                self.index,
                self.groups,
                world.num_workers,
                world.load_async,
                WritePolicy.from_name(world.write_policy),
                PrefetchPolicy.from_name(world.prefetch_policy, limits),
                lambda: self.now_s,
                events,
                Asked("fake", {}),
                world.keeps_storage,
                world.no_regret,
                limits=TransferLimits(batch_pages=world.batch_pages),
                saves=world.saves,
                loads=world.loads,
                explain_names=4096,
                eviction_policy=world.policy,
            )
        )
        self.ranks = [Rank(world, n, store and store[n]) for n in range(world.num_workers)]
        self.role.open([world.host_pages] * len(self.groups), self.ranks[0].page_bytes, store is not None)
        self.free = list(range(world.num_blocks - 1, 0, -1))  # block 0 is vLLM's null block
        self.known: dict[Any, int] = {}  # vLLM's own prefix cache: blocks by all that is before their end
        self.name_of: dict[int, Any] = {}
        self.users: dict[int, int] = {}
        self.local_tokens = 0
        self.waiting: list[FakeRequest] = []
        self.running: list[FakeRequest] = []
        self.zombies: dict[str, FakeRequest] = {}  # ended while their load was under way
        self.deferred: dict[str, tuple[int, FakeRequest, int]] = {}  # to be taken up: in which step, tokens
        self.num_steps = 0
        self._late: dict[str, list[OfferedState]] = {}  # what is said of states with the next step
        self.done: list[FakeRequest] = []
        self.hit_tokens = 0
        self.found: dict[str, tuple[int, int]] = {}  # when first admitted: tokens of vLLM's, of the host's
        self.num_preempted = 0
        self.num_quiet = 0
        self.num_recomputed = 0
        self.weights = 0

    # -- requests -----------------------------------------------------------------------------

    def add(self, request: FakeRequest) -> None:
        request.num_prompt = request.num_tokens
        self.waiting.append(request)
        self.role.arrived(request)

    def abort(self, request: FakeRequest) -> None:
        self.waiting = [r for r in self.waiting if r is not request]
        self.running = [r for r in self.running if r is not request]
        self._end(request)

    def _end(self, request: FakeRequest) -> None:
        self.role.finished(request, [list(table) for table in request.tables])
        self.done.append(request)
        if request.is_loading and self.deferred.pop(request.request_id, None) is None:
            self.zombies[request.request_id] = request
        else:
            self._free(request)

    def _free(self, request: FakeRequest) -> None:
        for table in request.tables:
            for block in filter(None, table):
                self._let_go(block)
        request.tables = []

    def _let_go(self, block: int) -> None:
        self.users[block] -= 1
        if not self.users[block]:
            self.free.append(block)

    def _take(self) -> int:
        """A free block to be written to: what it held is known no more."""
        block = self.free.pop()
        self.users[block] = 1
        self.known.pop(self.name_of.pop(block, None), None)
        return block

    def _local(self, request: FakeRequest) -> list[int]:
        """The blocks that vLLM's own prefix cache has of a prompt, all before its last token."""
        pages = range((request.num_tokens - 1) // S)
        return list(takewhile(bool, (self.known.get(request.name(page), 0) for page in pages)))

    def _share(self, request: FakeRequest, blocks: list[int]) -> None:
        """Its table begins with these."""
        for block in blocks:
            self.users[block] = self.users.get(block, 0) + 1
            if self.users[block] == 1:
                self.free.remove(block)
        request.tables = [list(blocks)]
        self.local_tokens += len(blocks) * S

    def _remember(self, request: FakeRequest) -> None:
        """Whole blocks that have been computed are found by the next one; vLLM refuses a change of weights
        while a request that waits for a load has older ones."""
        if request.weights != self.weights:
            return
        for page in range(request.num_computed_tokens // S if self.world.prefix_cache else 0):
            block, name = request.tables[0][page], request.name(page)
            if block not in self.name_of and name not in self.known:
                self.known[name], self.name_of[block] = block, name

    def _preempt(self) -> None:
        request = self.running.pop()
        self._free(request)
        request.num_computed_tokens = 0
        self.num_preempted += 1
        self.waiting.insert(0, request)

    def update_weights(self, preempts: bool) -> None:
        """All that is computed from here on is other numbers, and nothing may be found of those before.

        preempts: running requests begin again; else they go on with what they have. Where vLLM has a prefix
        cache of its own, that can be emptied only without them.
        """
        self.weights += 1
        while preempts and self.running:
            self._preempt()
        for request in self.running:
            if request.num_computed_tokens == 0:  # its load failed: it begins again, where it is
                request.weights = self.weights
        self.known.clear()
        self.name_of.clear()
        self.role.reset()

    # -- one step -----------------------------------------------------------------------------

    def step(self) -> Orders:
        """Schedule, let the workers compute and copy, take in what they say."""
        plans: list[tuple[FakeRequest, int, list[int]]] = []
        budget = self._schedule_running(plans)
        has_sync_loads = self._schedule_waiting(plans, budget)
        orders = self._orders(plans)
        collected = [self._work(rank, orders, plans, has_sync_loads) for rank in self.ranks]
        failed_blocks = {block for one in collected for block in one.failed_blocks}
        self._update(plans, failed_blocks)
        self._loads_ended(collected)
        for rank in self.ranks:
            self.role.apply(rank.role.take_outcomes())
        self._take_up_loads()
        self.now_s += 0.01
        return orders

    def _take_up_loads(self) -> None:
        """Those whose steps have passed."""
        self.num_steps += 1
        for request_id, (step, request, external) in list(self.deferred.items()):
            if step <= self.num_steps:
                del self.deferred[request_id]
                self.role.allocated(request, lambda r=request: r.tables, external)

    def _orders(self, plans: Sequence[Any]) -> Orders:
        """As the connector asks for them: in short where no request gets a block.

        Every other time the long way is gone all the same, which must come to the same.
        """
        quiet = None
        offers = {r.request_id: self._offers(r, r.num_computed_tokens + n) for r, n, _ in plans}
        if self.world.late:
            offers, self._late = {one: self._late.get(one, []) for one in offers}, offers
        if plans and not any(new for _, _, new in plans) and not any(offers.values()):
            quiet = self.role.quiet_step([(r.request_id, r.num_computed_tokens + n) for r, n, _ in plans])
        if quiet is not None:
            self.num_quiet += 1
            if self.num_quiet % 2:
                return quiet
        scheduled = [StepRequest(r.request_id, n, new, offers[r.request_id]) for r, n, new in plans]
        tables = {r.request_id: r.tables for r, _, _ in plans}
        orders = self.role.step(scheduled, lambda request_id: tables[request_id])
        assert quiet is None or orders is quiet, f"{orders} in a quiet step"
        return orders

    def _schedule_running(self, plans: list[Any]) -> int:
        budget = self.world.budget
        for request in list(self.running):
            if request not in self.running or budget == 0:
                continue
            count = self._clip(request, request.num_computed_tokens, budget)
            new = self._grow(request, request.num_computed_tokens + count, request)
            if new is None:
                continue
            plans.append((request, count, new))
            budget -= count
        plans[:] = [plan for plan in plans if plan[0] in self.running]
        return budget

    def _grow(self, request: FakeRequest, end: int, keep: FakeRequest) -> list[int] | None:
        """Blocks up to token `end`, preempting others for them; None if the request itself had to go."""
        self._slide(request, request.num_computed_tokens)
        pages = -(-end // S)
        while sum(self._short(request, group, pages) for group in self.groups) > len(self.free):
            self._preempt()
            if keep not in self.running:
                return None
        return [block for group in self.groups for block in self._extend(request, group, pages)]

    def _holes(self, request: FakeRequest, group: int, pages: int) -> int:
        """Up to which page a group's table has no blocks of its own: of states what the step passes over."""
        if group < self.world.num_attention:
            return 0
        return pages - 1 - int(self._leaves_checkpoint(request, pages))

    def _short(self, request: FakeRequest, group: int, pages: int) -> int:
        return max(0, pages - max(len(request.tables[group]), self._holes(request, group, pages)))

    def _extend(self, request: FakeRequest, group: int, pages: int) -> list[int]:
        table = request.tables[group]
        table += [0] * (self._holes(request, group, pages) - len(table))
        new = [self._take() for _ in range(pages - len(table))]
        table += new
        return new

    # -- recurrent states ---------------------------------------------------------------------

    def _clip(self, request: FakeRequest, start: int, budget: int) -> int:
        """Tokens of a step that begins at `start`: with states a prompt's steps end where blocks do."""
        count = min(budget, request.num_tokens - start)
        last = (request.num_tokens - 1) // S * S
        if not self.world.states or start >= last:
            return count
        if start % S:
            return min(count, S - start % S)
        end = start + count
        if end < request.num_tokens:
            aligned = end // S * S
            end = aligned if aligned > start else end
        elif not self._may_leave_checkpoint(start, end):
            end = last if start < last < end else end
        return end - start

    def _may_leave_checkpoint(self, start: int, end: int) -> bool:
        """Whether a step over several blocks can leave the state of the last end before its own behind."""
        last = (end - 1) // S * S
        return self.world.checkpoints and start % S == 0 and start + S <= last

    def _leaves_checkpoint(self, request: FakeRequest, pages: int) -> bool:
        """Whether the step that grows the tables to `pages` does; only one that ends the prompt."""
        end = request.num_tokens
        return pages == -(-end // S) and self._may_leave_checkpoint(request.next_start, end)

    def _offers(self, request: FakeRequest, end: int) -> list[OfferedState]:
        """Of a step up to `end`: the blocks in which it leaves the states of ends of blocks."""
        ends = {end // S * S} if end % S == 0 else set()
        if self.world.states and end == request.num_tokens and self._leaves_checkpoint(request, -(-end // S)):
            ends.add((end - 1) // S * S)
        groups = self.groups[self.world.num_attention :]
        return [
            OfferedState(group, request.tables[group][at // S - 1], at)
            for at in sorted(ends)
            for group in groups
        ]

    def _skipped(self, num_tokens: int) -> int:
        """Leading pages of the second group that a request with so many tokens computed needs no more."""
        return self.world.passed(num_tokens) // S

    def _slide(self, request: FakeRequest, num_tokens: int) -> None:
        request.next_start = num_tokens
        for group, table in enumerate(request.tables):
            for page in range(min(self._first_needed(group, num_tokens), len(table))):
                if table[page]:
                    self._let_go(table[page])
                    table[page] = 0

    def _first_needed(self, group: int, num_tokens: int) -> int:
        """The first page of a group's table that a request with so many tokens computed needs."""
        if group >= self.world.num_attention:
            return max(0, num_tokens - 1) // S
        return self._skipped(num_tokens) if group else 0

    def _schedule_waiting(self, plans: list[Any], budget: int) -> bool:
        loads_now = False
        for request in sorted(self.waiting, key=lambda r: not r.tables):  # who holds blocks goes first
            if request.is_loading:
                continue
            if budget == 0 or len(self.running) >= self.world.max_running:
                break
            external, local = 0, []
            if request.num_computed_tokens == 0:
                request.weights = self.weights
                local = self._local(request)
                found = self.role.lookup(request, len(local) * S)
                if found is None:
                    continue
                external = found
            goes_async = external > 0 and self.world.load_async
            start = request.num_computed_tokens + len(local) * S + external
            count = 0 if goes_async else self._clip(request, start, budget)
            if goes_async and not self._fits_whole(request):
                break
            if local:
                self._share(request, local)
            new = self._admit(request, start, start + count)
            if new is None:
                if local:
                    self.local_tokens -= len(local) * S
                    self._free(request)
                break
            self.hit_tokens += external
            self.found.setdefault(request.request_id, (len(local) * S, external))
            if goes_async and self.world.deferred:
                self.deferred[request.request_id] = (self.num_steps + self.world.deferred, request, external)
            else:
                self.role.allocated(request, lambda r=request: r.tables, external)
            request.num_computed_tokens = start
            if goes_async:
                request.is_loading = True
                continue
            self.waiting.remove(request)
            self.running.append(request)
            plans.append((request, count, new))
            budget -= count
            loads_now |= external > 0
        return loads_now

    def _fits_whole(self, request: FakeRequest) -> bool:
        """Whether blocks are left for all its tokens when everyone who holds some has all of theirs.

        A load holds its blocks without progress: two half loaded requests could wait for each other for good.
        """
        lacking = 0
        for one in (request, *self.running, *(r for r in self.waiting if r.tables)):
            tables = one.tables or [[] for _ in self.groups]
            lacking += sum(max(0, -(-one.num_tokens // S) - len(table)) for table in tables)
        return lacking <= len(self.free)

    def _admit(self, request: FakeRequest, start: int, end: int) -> list[int] | None:
        """Blocks for a request that has none beyond what it has loaded."""
        request.tables = request.tables or [[] for _ in self.groups]
        request.next_start = start
        before, pages, short, loaded = [list(table) for table in request.tables], -(-end // S), 0, start // S
        for group, table in enumerate(request.tables):
            first = min(self._first_needed(group, start), loaded)
            table += [0] * (first - len(table))
            short += max(0, loaded - len(table)) + max(
                0, pages - max(len(table), loaded, self._holes(request, group, pages))
            )
        if short > len(self.free):
            request.tables = before if any(before) else []
            return None
        new = []
        for group, table in enumerate(request.tables):
            table += [self._take() for _ in range(loaded - len(table))]
            new += self._extend(request, group, pages)
        return new

    # -- workers ------------------------------------------------------------------------------

    def _work(self, rank: Rank, orders: Orders, plans: Sequence[Any], has_sync_loads: bool) -> Any:
        rank.role.before_forward(orders)
        waits = has_sync_loads and rank.role.start_loads(orders)
        if plans:
            self._forward(rank, plans, waits)
        if not has_sync_loads:
            rank.role.start_loads(orders)
        rank.role.after_forward(orders)
        return rank.role.collect(orders)

    def _forward(self, rank: Rank, plans: Sequence[Any], waits: bool) -> None:
        wrong: dict[str, tuple[int, int, int]] = {}
        for layer in range(LAYERS * len(self.groups)):
            if waits:
                rank.role.wait_layer(layer)
            for request, _, _ in plans:
                at = self._misread(rank, request, layer)
                if at is not None:
                    wrong.setdefault(request.request_id, at)
        has_failed = rank.role.step_failed
        without_load = {load.request_id for load in rank.role._gone}
        assert has_failed or not (wrong.keys() - without_load), f"read of what is not theirs: {wrong}"
        for request, count, _ in plans:
            for position in range(request.num_computed_tokens, request.num_computed_tokens + count):
                number = request.number(position)
                # What is computed from a load that failed is wrong in a way of its own.
                number += 500_000 if request.request_id in wrong else 0
                for group in range(self.world.num_attention):
                    rank.write(group, request.tables[group][position // S], position % S, number)
            self._write_states(
                rank, request, request.num_computed_tokens + count, request.request_id in wrong
            )

    def _write_states(self, rank: Rank, request: FakeRequest, end: int, is_wrong: bool) -> None:
        ends = {end, *(offer.num_tokens for offer in self._offers(request, end))} if self.world.states else ()
        for group in self.groups[self.world.num_attention :]:
            for at in ends:
                number = request.number(at - 1) + (500_000 if is_wrong else 0)
                rank.write_state(group, request.tables[group][-(-at // S) - 1], number)

    def _misread(self, rank: Rank, request: FakeRequest, layer: int) -> tuple[int, int, int] | None:
        group, own = divmod(layer, LAYERS)
        if group >= self.world.num_attention:
            return self._misread_state(rank, request, group, own)
        begin = 0 if group == 0 else self.world.passed(request.num_computed_tokens)
        for position in range(begin, request.num_computed_tokens):
            at = (group, request.tables[group][position // S], position % S)
            if not at[1] or not rank.reads_right(own, at, request.number(position)):
                return at
        return None

    def _misread_state(
        self, rank: Rank, request: FakeRequest, group: int, layer: int
    ) -> tuple[int, int, int] | None:
        position = request.num_computed_tokens - 1
        if position < 0:
            return None
        block = request.tables[group][position // S]
        is_right = block and rank.state_is(layer, group, block, request.number(position))
        return None if is_right else (group, block, position)

    def _update(self, plans: Sequence[Any], failed_blocks: set[int]) -> None:
        for request, count, _ in plans:
            broken = [i for i, block in enumerate(request.tables[0]) if block in failed_blocks]
            if broken and broken[0] * S < request.num_computed_tokens:
                request.num_computed_tokens = broken[0] * S
                self.num_recomputed += 1
                continue
            request.num_computed_tokens += count
            self._remember(request)
            if request.num_computed_tokens == request.num_tokens:
                request.all_token_ids.append(request.number(request.num_tokens - 1) % 3)
                if request.num_tokens >= request.num_prompt + request.max_tokens:
                    self.running.remove(request)
                    self._end(request)

    def _loads_ended(self, collected: Sequence[Any]) -> None:
        """A load has ended when it has on every worker; vLLM counts them."""
        self._ended: dict[str, int] = getattr(self, "_ended", {})
        self._failed: set[str] = getattr(self, "_failed", set())
        for one in collected:
            self._failed |= one.failed
            for request_id in one.loaded:
                self._ended[request_id] = self._ended.get(request_id, 0) + 1
        for request_id in [r for r, n in self._ended.items() if n == len(self.ranks)]:
            del self._ended[request_id]
            failed = request_id in self._failed
            self._failed.discard(request_id)
            self._load_ended(request_id, failed)

    def _load_ended(self, request_id: str, failed: bool) -> None:
        if (zombie := self.zombies.pop(request_id, None)) is not None:
            self._free(zombie)
            return
        request = next(r for r in self.waiting if r.request_id == request_id)
        request.is_loading = False
        if failed:
            self._free(request)
            request.num_computed_tokens = 0
            self.num_recomputed += 1

    # -- whole ----------------------------------------------------------------------------------

    def run(self, wanted: Callable[[], bool], max_steps: int = 500) -> None:
        """Step, and let background workers run, until `wanted`."""
        for _ in range(max_steps):
            if wanted():
                return
            for rank in self.ranks:
                rank.driver.step()
                rank.follow()
            self.step()
        raise AssertionError(f"not reached in {max_steps} steps: {len(self.waiting)} wait")

    def check_explained(self, request: FakeRequest) -> None:
        """Each token of its prompt has one source, as it was when it was admitted."""
        asked = self.role.explanations.latest(str(MOST_SHOWN))["requests"]
        of_it: Any = [one for one in asked if one["id"] == request.request_id]  # type: ignore[attr-defined]
        for one in of_it:
            device, host = self.found[request.request_id]
            sources = one["by_source"]
            assert one["prompt_tokens"] == request.num_prompt and sources.get("device", 0) == device
            loaded = sources.get("host", 0) + sources.get("storage", 0)
            assert loaded in (0, host), f"{one}, {host} were promised"
            assert sum(one["by_reason"].values()) == request.num_prompt - device - loaded

    def drain(self) -> None:
        """Until nothing is left to do, and then everything is in its place."""
        self.run(lambda: not self.waiting and not self.running and not self.zombies and self.role.is_idle)
        self.role.check()
        for request in self.done[-MOST_KEPT:]:
            self.check_explained(request)
        assert not self.role.requests and len(self.free) == self.world.num_blocks - 1
        assert self.index.tree.evictable_pages(1) == self.index.tree.resident_pages(1), "something is locked"
