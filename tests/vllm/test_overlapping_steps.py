"""vLLM's own scheduler for overlapping steps around both roles, with states, windows and full attention.

The model is a stand-in: each position's cell holds a number made of everything before it, a state the number of
its last position, and every cell that a step would read is compared before it is used. Steps are planned before
the one before has been taken in, copies run on the connector's threads, and memory is short.
"""

from __future__ import annotations

import random
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from hiradix.adapters.vllm import HiRadixConnector
from hiradix.adapters.vllm.scheduler import SchedulerRole
from hiradix.cache.foreign_device import ForeignDevice
from tests.vllm.play import UNGATED
from tests.vllm.test_storage import with_storage

BLOCK, BLOCKS, WINDOW = 16, 72, 40
PAGE_BYTES = BLOCK * 2 * 4
FULL, WINDOWED = 0, 1  # KV cache groups; the others are of states
ATTENTION: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
STATE = MambaSpec(
    block_size=BLOCK, shapes=((2,), (3,)), dtypes=(torch.int32, torch.float64), page_size_padded=PAGE_BYTES,
    mamba_type=MambaAttentionBackendEnum.GDN_ATTN, mamba_cache_mode="align",
)  # fmt: skip
GROUPS = [FullAttentionSpec(**ATTENTION), SlidingWindowSpec(**ATTENTION, sliding_window=WINDOW), STATE, STATE]


@dataclass
class Running:
    """What a worker knows of a request."""

    tokens: list[int]
    tables: list[list[int]]
    numbers: list[int] = field(default_factory=list)

    def number(self, position: int) -> int:
        """What a position's data is made of: all tokens up to it."""
        while len(self.numbers) <= position:
            at = len(self.numbers)
            before = self.numbers[-1] if at else 0
            self.numbers.append(zlib.crc32(self.tokens[at].to_bytes(4, "little"), before) % 999_983)
        return self.numbers[position]


class Worker:
    """The model's side of a step, in the order of vLLM's model runner."""

    def __init__(self, config: Any, caches: KVCacheConfig) -> None:
        self.raw = torch.zeros(BLOCKS, PAGE_BYTES, dtype=torch.uint8)
        cells = self.raw.view(torch.float32).view(BLOCKS, 1, BLOCK, 2)
        states = self.raw[:, : STATE.state_content_size_bytes].view(torch.int8).view(BLOCKS, 1, 1, -1)
        self.cells = self.raw.numpy().view(np.float32).reshape(BLOCKS, 2, BLOCK)
        self.connector: Any = HiRadixConnector(config, KVConnectorRole.WORKER, caches)
        self.connector.register_kv_caches(
            {f"layers.{group}": cells if group <= WINDOWED else states for group in range(len(GROUPS))}
        )
        self.running: dict[str, Running] = {}
        self.num_compared = 0

    def execute(self, plan: Any) -> ModelRunnerOutput:
        connector = self.connector
        connector.handle_preemptions(plan.kv_connector_metadata)
        for block in plan.new_block_ids_to_zero or ():
            self.raw[block] = 0
        for source, target in plan.kv_cache_block_copies or ():
            self.raw[target] = self.raw[source]
        self._follow(plan)
        connector.bind_connector_metadata(plan.kv_connector_metadata)
        assert not plan.has_sync_kv_loads
        starts = {new.req_id: new.num_computed_tokens for new in plan.scheduled_new_reqs}
        cached = plan.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        sampled = [self._compute(one, starts[one], count) for one, count in plan.num_scheduled_tokens.items()]
        connector.start_load_kv(None)
        connector.wait_for_save()
        ended = connector.get_transfer_results(plan.finished_req_ids)
        output = KVConnectorOutput(
            finished_recving=set(ended.finished_recving) or None,
            failed_recving=set(ended.failed_recving),
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        connector.clear_connector_metadata()
        names = list(plan.num_scheduled_tokens)
        return ModelRunnerOutput(
            names, {name: at for at, name in enumerate(names)}, sampled, kv_connector_output=output
        )

    def _follow(self, plan: Any) -> None:
        """The step's tables."""
        for name in plan.finished_req_ids:
            self.running.pop(name, None)
        for new in plan.scheduled_new_reqs:
            self.running[new.req_id] = Running(
                list(new.prompt_token_ids), [list(one) for one in new.block_ids]
            )
        cached = plan.scheduled_cached_reqs
        for name, new in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                self.running[name].tables = [list(one) for one in new]
            elif new is not None:
                for table, more in zip(self.running[name].tables, new, strict=True):
                    table += more

    def _compute(self, name: str, start: int, count: int) -> list[int]:
        """Compare all that is read, write what is computed; the token that is sampled, if one is."""
        one, end = self.running[name], start + count
        for group, table in enumerate(one.tables):
            if group > WINDOWED:
                self._go_on(one, group, start, end)
                continue
            for position in range(max(0, start - WINDOW + 1) if group == WINDOWED else 0, start):
                number = one.number(position) + group
                found = self.cells[table[position // BLOCK], :, position % BLOCK].tolist()
                assert found == [number, -number], f"{name}: group {group}, position {position} of {start}"
                self.num_compared += 1
            for position in range(start, end):
                number = one.number(position) + group
                self.cells[table[position // BLOCK], :, position % BLOCK] = number, -number
        if end < len(one.tokens):
            return []
        one.tokens.append(one.number(end - 1) % 97 + 3)
        return one.tokens[-1:]

    def _go_on(self, one: Running, group: int, start: int, end: int) -> None:
        """A group's state, from the block where the step before has left it to the one this one ends in."""
        table = one.tables[group]
        if start:
            block = table[(start - 1) // BLOCK]
            assert block and self.raw[block].numpy()[:32].tobytes() == _state(
                one.number(start - 1) + group
            ), f"state of group {group} behind {start} tokens in block {block}"
            self.num_compared += 5
        self.raw[table[(end - 1) // BLOCK], :32] = torch.frombuffer(
            bytearray(_state(one.number(end - 1) + group)), dtype=torch.uint8
        )


def _state(number: int) -> bytes:
    tail = np.array([number, -number], np.int32).tobytes()
    return tail + np.array([number, -number, number + 0.5], np.float64).tobytes()


class Overlapped:
    """vLLM's scheduler two steps ahead of what it has heard of."""

    def __init__(self, config: Any) -> None:
        groups = [KVCacheGroupSpec([f"layers.{number}"], spec) for number, spec in enumerate(GROUPS)]
        caches = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)
        manager = StructuredOutputManager(config)
        self.scheduler: Any = AsyncScheduler(config, caches, manager, BLOCK, BLOCK)
        self.worker = Worker(config, caches)
        self.role = self.scheduler.connector.scheduler
        self.scheduler.connector.set_xfer_handshake_metadata_pp_aware(
            {(0, 0): self.worker.connector.get_handshake_metadata()}
        )
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.pending: deque[tuple[Any, ModelRunnerOutput]] = deque()

    def add(self, name: str, tokens: list[int], max_tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        self.scheduler.add_request(Request(name, tokens, params, None, block_hasher=self.hasher))

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        plan = self.scheduler.schedule()
        self.pending.append((plan, self.worker.execute(plan)))
        if len(self.pending) > 1:
            self.scheduler.update_from_output(*self.pending.popleft())
        if not plan.total_num_scheduled_tokens:
            time.sleep(0.001)  # the connector's threads have the word

    def finish(self) -> None:
        for _ in range(20_000):
            if not self.scheduler.has_unfinished_requests() and self.role.is_idle:
                break
            self.step()
        assert not self.scheduler.has_unfinished_requests() and self.role.is_idle
        self.role.check()

    def close(self) -> None:
        self.worker.connector.shutdown()
        self.scheduler.connector.shutdown()


@pytest.fixture
def config(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    group = SimpleNamespace(rank_in_group=0, world_size=1)
    for name in ("get_tp_group", "get_pp_group"):
        monkeypatch.setattr(parallel_state, name, lambda: group)
    extra = with_storage("file", file_storage_path=str(tmp_path / "pages"))
    extra["hicache_storage_backend_extra_config"]["prefetch_threshold"] = BLOCK
    transfer = KVTransferConfig(
        kv_connector="HiRadixConnector", kv_connector_module_path="hiradix.adapters.vllm", kv_role="kv_both",
        kv_connector_extra_config=UNGATED | extra | {"hicache_size": 50 * 4 * PAGE_BYTES / 1e9},
    )  # fmt: skip
    made = EngineArgs(
        str(model), skip_tokenizer_init=True, enforce_eager=True, max_model_len=512, max_num_seqs=8,
        max_num_batched_tokens=96, enable_prefix_caching=True, kv_transfer_config=transfer,
    ).create_engine_config()  # fmt: skip
    made.cache_config.block_size, made.cache_config.num_gpu_blocks = BLOCK, BLOCKS
    made.cache_config.mamba_cache_mode = "align"
    made.scheduler_config.async_scheduling = True
    yield made


@dataclass
class Seen:
    """What lives have come by."""

    cells: int = 0
    hit_tokens: int = 0
    loaded_pages: int = 0
    saved_pages: int = 0
    preemptions: int = 0


def live(config: Any, seed: int, seen: Seen, num_requests: int = 120) -> None:
    """Prompts that begin alike, in little memory, with aborts."""
    rng, engine = random.Random(seed), Overlapped(config)
    assert engine.role.plan.num_overlapping == 2
    begins = [[rng.randrange(3, 99) for _ in range(160)] for _ in range(4)]
    whole = engine.scheduler._preempt_request

    def counted(*args: Any, **kwargs: Any) -> Any:
        seen.preemptions += 1
        return whole(*args, **kwargs)

    engine.scheduler._preempt_request = counted
    try:
        for number in range(num_requests):
            own = [rng.randrange(3, 99) for _ in range(rng.randrange(1, 30))]
            tokens = [*rng.choice(begins)[: rng.randrange(10, 160)], *own]
            engine.add(f"r{number}", tokens, rng.randrange(1, 40))
            for _ in range(rng.randrange(6)):
                engine.step()
            if rng.random() < 0.15 and engine.scheduler.requests:
                engine.abort(rng.choice(list(engine.scheduler.requests)))
        engine.finish()
    finally:
        seen.cells += engine.worker.num_compared
        seen.hit_tokens += engine.role.figures.hit_tokens
        seen.loaded_pages += engine.role.figures.loaded_pages
        seen.saved_pages += engine.role.figures.saved_pages
        engine.close()


def test_every_cell_is_right_where_steps_overlap(config: Any) -> None:
    """Preemptions, aborts and hits from the device, the host and storage; then another engine on the same
    store."""
    seen = Seen()
    for seed in (0, 1, 0):
        live(config, seed, seen)
    assert seen.cells > 500_000 and seen.hit_tokens > 5000
    assert seen.loaded_pages > 100 and seen.preemptions > 10


def test_a_producer_saves_for_a_consumer_that_saves_nothing(config: Any) -> None:
    """As `kv_role` says, over one store."""
    transfer, found = config.kv_transfer_config, {}
    for role in ("kv_producer", "kv_consumer"):
        transfer.kv_role, found[role] = role, Seen()
        live(config, 0, found[role], num_requests=40)
    producer, consumer = found.values()
    assert producer.saved_pages > 50 and producer.hit_tokens == producer.loaded_pages == 0
    assert consumer.loaded_pages > 50 and consumer.saved_pages == 0


def a_state_one_block_off(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = SchedulerRole._states

    def states(self: SchedulerRole, tracked: Any, offered: Any, blocks: Any, due: int) -> Any:
        moved = [offer._replace(num_tokens=max(BLOCK, offer.num_tokens - BLOCK)) for offer in offered]
        return whole(self, tracked, moved, blocks, due)

    monkeypatch.setattr(SchedulerRole, "_states", states)


def states_are_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ForeignDevice._copies

    def copies(self: ForeignDevice, *args: Any) -> Any:
        return tuple(copy for copy in whole(self, *args) or () if copy.pair not in self._states)

    monkeypatch.setattr(ForeignDevice, "_copies", copies)


@pytest.mark.parametrize(
    "plant", [a_state_one_block_off, states_are_not_loaded], ids=lambda plant: plant.__name__
)
def test_a_planted_fault_is_seen(
    config: Any, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="state of group"):
        for seed in range(4):
            live(config, seed, Seen())
