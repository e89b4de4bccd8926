"""A reference engine without a model: the real scheduler and prefix cache, and a forward that checks bytes.

Each token's KV is a number made of its namespace and of all tokens up to it. A forward reads the whole
prefix of each request and compares every number of every layer: miss or exact.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np

from hiradix.apps.engine.api import FINISH_LENGTH, SamplingParams, Scope
from hiradix.apps.engine.request import Request
from hiradix.apps.engine.scheduler import ScheduledTokens, Scheduler
from hiradix.prefix_cache import HiRadixCache
from hiradix.transfer import LoadFailed, StepDriver
from tests.simulation.memory import NUM_LAYERS, Broken, DevicePages, SimStreams

MASK = (1 << 62) - 1
VOCABULARY = 3
FORWARD_S = 0.002
TOKEN_S = 0.0001


def first_link(scope: Scope) -> int:
    """What a namespace's chains of numbers start from; the same in every run."""
    text = repr((scope.extra_key, scope.cache_salt)).encode()
    return int.from_bytes(text, "little") % MASK


def next_link(link: int, token: int) -> int:
    return (link * 6364136223846793005 + token * 1442695040888963407 + 1013904223) & MASK


class SimRequest(Request):
    """A request that knows what each of its tokens' KV must be: `chain[i]` for token i."""

    def __init__(self, rid: str, prompt: list[int], max_new_tokens: int, scope: Scope):
        super().__init__(rid, prompt, SamplingParams(max_new_tokens=max_new_tokens), scope)
        self.chain = array("q")
        self._link = first_link(scope)
        self.known(prompt)
        self.arrived_s = 0.0

    def known(self, tokens: list[int]) -> None:
        for token in tokens:
            self._link = next_link(self._link, token)
            self.chain.append(self._link)

    def sample(self) -> None:
        """The next token: any fixed function of all before it."""
        token = self._link // 7 % VOCABULARY
        self.output_ids.append(token)
        self.known([token])

    @property
    def is_done(self) -> bool:
        return len(self.output_ids) >= self.max_new_tokens


@dataclass(frozen=True)
class Parts:
    """What a simulated engine runs on."""

    pool: DevicePages
    streams: SimStreams
    driver: StepDriver
    overlap: bool


class SimEngine:
    """Plan and forward, as `engine.Engine.step` does them; with `overlap`, other things happen in between."""

    def __init__(self, cache: HiRadixCache, scheduler: Scheduler, parts: Parts):
        self.cache, self.scheduler = cache, scheduler
        self.pool, self.streams, self.driver = parts.pool, parts.streams, parts.driver
        self.overlap = parts.overlap
        self._planned: list[ScheduledTokens] = []
        self._gates: tuple[int, ...] = ()
        self.finished: list[SimRequest] = []
        self.num_reads = 0
        self.num_parts = 0

    def spend(self, num_tokens: int) -> None:
        """The time of a forward passes."""
        self.driver.advance(self.price(num_tokens))

    def price(self, num_tokens: int) -> float:
        """The time of a forward that waits for nothing."""
        return FORWARD_S + TOKEN_S * num_tokens

    def step(self) -> bool:
        """The forward that was planned, or plan one and, without overlap, run it. False: nothing to do."""
        if self._planned:
            self.forward()
            return True
        self.cache.check_hicache_events()
        parts = self.scheduler.plan()
        gate = self.cache.ready_to_load_host_cache()
        if gate < 0:
            self._gates = ()
        elif gate not in self._gates:
            self._gates += (gate,)
        self.spend(sum(part.num_tokens for part in parts))
        self._planned = parts
        if not self.overlap:
            self.forward()
        return bool(parts)

    def forward(self) -> None:
        """Compute what is planned, if anything is."""
        parts, self._planned = self._planned, []
        if not parts:
            return
        counter = self.cache.layer_done_counter
        counter.set_consumer(*self._gates)
        self.num_parts += len(parts)
        try:
            for layer in range(NUM_LAYERS):
                counter.wait_until(layer)
                for part in parts:
                    self._attend(part, layer)
        except LoadFailed:
            for part in reversed(parts):
                if part.admitted:
                    self.scheduler.undo_admission(part.request)
            self._gates = tuple(slot for slot in self._gates if counter.error(slot) is None)
            return
        num_tokens = sum(part.num_tokens for part in parts)
        if not self._gates:
            self.cache.note_prefill(num_tokens, self.price(num_tokens))
        self._gates = ()
        for part in parts:
            request = part.request
            if self.scheduler.computed(part):
                request.sample()
                self.scheduler.answered(request)
                if request.is_done:
                    self.scheduler.finish(request, FINISH_LENGTH)
                    self.finished.append(request)
        if not (self.scheduler.running or self.scheduler.waiting):
            self.cache.ready_to_load_host_cache()

    def _attend(self, part: ScheduledTokens, layer: int) -> None:
        """Read the prefix and write the part's own tokens, when the compute stream comes to it."""
        request: Any = part.request
        start = request.num_computed
        end = start + part.num_tokens
        row = self.scheduler.row(request)[:end].numpy().astype(np.int64)
        want = np.frombuffer(request.chain, np.int64)[:end].copy()
        self.num_reads += start

        def work() -> None:
            data = self.pool.data[layer]
            found = data[row[:start]]
            if not np.array_equal(found, want[:start]):
                at = int(np.flatnonzero(found != want[:start])[0])
                raise Broken(
                    f"{request.rid} reads {found[at]} as layer {layer} of its token {at} of {start}, "
                    f"in slot {row[at]}; it must be {want[at]}"
                )
            data[row[start:]] = want[start:]

        self.streams.compute(work)
