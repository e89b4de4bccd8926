"""vLLM's scheduler with its waiting queue in the order of an admission policy. Tested with vLLM 0.32.0.

    vllm serve MODEL --scheduler-cls hiradix.adapters.vllm.HiRadixScheduler

What a step does with the requests it takes is vLLM's: here is decided who is offered to it, and when.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from vllm.v1.core.kv_cache_utils import resolve_block_hashes
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from hiradix.adapters.vllm.connector import HiRadixConnector
from hiradix.adapters.vllm.residency import DevicePrefixes, IdleBlocks, QueuePrices
from hiradix.adapters.vllm.scheduler import SchedulerRole
from hiradix.adapters.vllm.settings import schedule_policy
from hiradix.adapters.vllm.step_meter import StepMeter
from hiradix.errors import ConfigError
from hiradix.policy.admission import make_admission
from hiradix.policy.admission_controller import AdmissionController
from hiradix.policy.no_regret import NoRegret
from hiradix.policy.prices import Prices

logger = logging.getLogger(__name__)

NAME_TOKENS = 128  # a prompt's predecessor is told by names so far apart
TENANT = "tenant"  # key of a request's `vllm_xargs`
MOST_ORDERS = 8  # that a step has made for whom it could not take

_STARTED = (RequestStatus.RUNNING, RequestStatus.WAITING_FOR_REMOTE_KVS)
_STOPS = {
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "abort",
}


class AdmissionQueue(RequestQueue):
    """vLLM's waiting queue, of which the next step sees only what is offered: `len` counts all that wait,
    `bool` is true if something is offered.

    follow: brings the offer up to date; called before each look at it. taken: what was popped since the last
    `follow` and is not back. has_new: something was added since the last offer.
    """

    def __init__(self, follow: Callable[[], None]) -> None:
        self._follow = follow
        self._all: dict[str, Request] = {}
        self._offer: deque[Request] = deque()
        self.taken: list[Request] = []
        self.has_new = False

    def offer(self, first: Callable[[Request], bool], order: Iterable[str]) -> None:
        """Offer those of whom `first` is true, by arrival, and behind them `order`, as far as they wait here."""
        self.has_new = False
        ahead = sorted(filter(first, self._all.values()), key=lambda request: request.arrival_time)
        self._offer = deque(ahead)
        self._offer += (self._all[rid] for rid in order if rid in self._all)

    @property
    def has_unseen(self) -> bool:
        """Whether somebody is here, and nobody is offered."""
        return bool(self._all) and not self._offer

    def add_request(self, request: Request) -> None:
        self._all[request.request_id] = request
        self.has_new = True

    def prepend_request(self, request: Request) -> None:
        self._all[request.request_id] = request
        self._offer.appendleft(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.prepend_request(request)

    def pop_request(self) -> Request:
        request = self.peek_request()
        self._offer.popleft()
        del self._all[request.request_id]
        self.taken.append(request)
        return request

    def peek_request(self) -> Request:
        if not self._offer:
            raise IndexError("nothing is offered")
        return self._offer[0]

    def remove_request(self, request: Request) -> None:
        self.remove_requests((request,))

    def remove_requests(self, requests: Iterable[Request]) -> None:
        gone = {request.request_id for request in requests}
        for rid in gone:
            self._all.pop(rid, None)
        self._offer = deque(request for request in self._offer if request.request_id not in gone)

    def __bool__(self) -> bool:
        self._follow()
        return bool(self._offer)

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._all.values()))


class HiRadixScheduler(Scheduler):
    """Offers vLLM's step the requests that its admission policy would serve, the next first.

    Made with asynchronous scheduling on, it is a `HiRadixAsyncScheduler`. What the policy does not follow goes
    first, by arrival: requests that were preempted, and streaming-input sessions. Prefills under way stay in the
    order in which they were begun. Whom a step looks at and passes over, as a prefetch, a grammar or a LoRA is
    waited for, holds nobody back: with the next look those are ordered that are left.
    """

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> HiRadixScheduler:
        is_async = bool(vllm_config.scheduler_config.async_scheduling)
        made = HiRadixAsyncScheduler if is_async and cls is HiRadixScheduler else cls
        made_one: HiRadixScheduler = super().__new__(made)
        return made_one

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        _refuse_options(vllm_config)
        name = schedule_policy(vllm_config.kv_transfer_config)
        super().__init__(vllm_config, *args, **kwargs)
        connector = self.connector
        role = connector.scheduler if isinstance(connector, HiRadixConnector) else None
        if connector is not None and role is None:
            logger.warning("HiRadixScheduler: what %s has is not asked for", type(connector).__name__)
        clock = time.monotonic
        self._role: SchedulerRole | None = role
        self._meter: StepMeter | None = None  # the connector has its own
        if role is None:
            gate = NoRegret(page_size=self.block_size)
            overlapping = vllm_config.max_concurrent_batches
            self._meter = StepMeter(gate, clock, self.block_size, overlapping)
            prices = Prices(gate, self.block_size)
        else:
            prices = Prices(role.no_regret, role.index.page_size)
        device = self._look_at_device()
        self._idle = None if device is None else device[1]
        self._device = None if device is None else device[0]
        self._queue_prices = QueuePrices(prices, self._device, role, clock)
        self._admission = AdmissionController(
            make_admission(name, self._capacity()),
            prices.first_token_s,
            self._price_s,
            clock,
            is_preemptive=False,
        )
        self._prefilling: dict[str, Request] = {}  # started, and without a first token
        self._passed: dict[str, None] = {}  # looked at in this step, and not taken
        self._passed_before: dict[str, None] = {}  # in the step before
        self._left_out: Collection[str] = ()  # of the last order
        self._orders_left = MOST_ORDERS
        self.waiting: AdmissionQueue = AdmissionQueue(self._follow)
        logger.info(
            "HiRadixScheduler: %s, by %s", name, "device alone" if role is None else "device and host"
        )

    def _look_at_device(self) -> tuple[DevicePrefixes, IdleBlocks] | None:
        """vLLM's own prefix cache, by its first group of full attention; None: there is none."""
        kinds = [type(group.kv_cache_spec).__name__ for group in self.kv_cache_config.kv_cache_groups]
        full = [at for at, kind in enumerate(kinds) if kind in ("FullAttentionSpec", "MLAAttentionSpec")]
        if not full or not self.cache_config.enable_prefix_caching:
            return None
        spec = self.kv_cache_config.kv_cache_groups[full[0]].kv_cache_spec
        size, hash_size = spec.block_size * self.dcp_world_size, self.hash_block_size
        pool = self.kv_cache_manager.block_pool
        prefixes = DevicePrefixes(
            size,
            lambda name: pool.get_cached_block(name, full[:1]) is not None,
            lambda names: resolve_block_hashes(names, hash_size, size),
        )
        return prefixes, IdleBlocks(pool, full[0])

    def _capacity(self) -> int:
        """Tokens from which a prefix comes back sooner than it is computed."""
        groups = max(1, len(self.kv_cache_config.kv_cache_groups))
        device: int = self.kv_cache_config.num_blocks * self.block_size // groups
        if self._role is None or not self._role.index.is_open:
            return device
        host = self._role.index.num_pages * self._role.index.page_size
        return device + host if self._role.plan.writes.writes_on_evict else max(device, host)

    # -- what happens -----------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        is_new = request.request_id not in self.requests
        super().add_request(request)
        if not is_new or request.resumable:
            return
        self._admission.policy.capacity = self._capacity()  # the host's is known when the workers are
        every = max(1, NAME_TOKENS // self.hash_block_size)
        self._admission.add(
            request.request_id,
            request.num_tokens,
            request.max_tokens,
            _tenant(request),
            request.session_id or "",
            request.block_hashes[every - 1 :: every],
        )

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)
        self._note_taken()
        self._passed, self._passed_before, self._orders_left = {}, self._passed, MOST_ORDERS
        if self._meter is not None:
            num_tokens, num_requests = output.total_num_scheduled_tokens, len(output.num_scheduled_tokens)
            self._meter.planned(num_tokens, num_tokens >= max(1, 2 * num_requests))
        return output

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().update_from_output(*args, **kwargs)
        for rid, request in list(self._prefilling.items()):
            if request.num_output_tokens:
                self._has_first_token(rid)
        return outputs

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        rid = request.request_id
        if rid in self._admission:
            stop = _STOPS.get(request.status, "")
            if rid in self._prefilling and (request.num_output_tokens or stop != "abort"):
                self._has_first_token(rid)
            self._prefilling.pop(rid, None)
            self._queue_prices.forget(rid)
            if self._idle is not None and self._device is not None:
                names = self._device.names(request)
                self._idle.ended(self._admission.session_of(rid), names)
            self._admission.end(rid, stop, request.num_output_tokens)
        return super()._free_request(request, *args, **kwargs)

    def _has_first_token(self, rid: str) -> None:
        del self._prefilling[rid]
        self._queue_prices.forget(rid)
        self._admission.first_token(rid)

    # -- what is offered --------------------------------------------------------------------

    def _follow(self) -> None:
        self._note_taken()
        if self._admission.is_stale or self.waiting.has_new:
            self._offer(self._passed)
        elif self._orders_left and self.waiting.has_unseen and not self._passed.keys() <= {*self._left_out}:
            self._orders_left -= 1
            self._offer({**self._passed_before, **self._passed})

    def _offer(self, without: Collection[str]) -> None:
        """Offer those that wait: who was passed over before this step is looked at again, the others by a new
        order, as if these were not there."""
        for session in self._admission.policy.take_left():
            if self._idle is not None:
                self._idle.leave(session)
        self._left_out = tuple(without)
        order = list(dict.fromkeys((*without, *self._admission.order(without))))
        if self._role is not None and self._role.has_storage and self._role.index.is_open:
            self._role.prefetcher.in_order(order)
        self.waiting.offer(lambda request: not self._admission.is_waiting(request.request_id), order)

    def _note_taken(self) -> None:
        """Whom the step has given blocks since it was last looked; the others it has passed over."""
        for request in self.waiting.taken:
            rid = request.request_id
            if request.status in _STARTED and rid in self._admission and not request.num_output_tokens:
                self._prefilling[rid] = request
                self._admission.start(rid)
            elif self._admission.is_waiting(rid):
                self._passed[rid] = None
        self.waiting.taken.clear()

    def _price_s(self, rid: str) -> float:
        return self._queue_prices.price_s(self.requests[rid])


class HiRadixAsyncScheduler(HiRadixScheduler, AsyncScheduler):
    """The same for steps that overlap."""


def _refuse_options(config: Any) -> None:
    """Raise ConfigError for what decides the order itself."""
    if config.scheduler_config.policy != "fcfs":
        raise ConfigError(
            f"--scheduling-policy {config.scheduler_config.policy}: HiRadixScheduler orders requests itself"
        )
    if config.model_config.is_diffusion:
        raise ConfigError("--model: diffusion models have a scheduler of their own")


def _tenant(request: Request) -> str:
    """Whose share of service a request takes: as its client says, or by its salt."""
    params = request.sampling_params
    told = (params.extra_args or {}).get(TENANT) if params is not None else None
    return str(told or request.cache_salt or "")
