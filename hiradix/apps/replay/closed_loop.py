"""Agents against one server with the real cache: who waits how long for the first token.

Time is simulated, the cache is not (see `simulated_cache`), and neither is who is served next: the policies
of `hiradix.policy.admission`, which the engines' own `AdmissionController` tells of the requests. The server
fetches, loads and computes for one request at a time, chunk by chunk, and asks who is next after each;
answers are decoded beside that, at a rate of their own. An answer's pages are held until its end and are not
cached.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from hiradix.apps.replay.simulated_cache import SimulatedCache, Tiers
from hiradix.apps.replay.timing import Machine
from hiradix.apps.traces.crowd import Agent, Turn
from hiradix.apps.traces.sessions import BLOCK
from hiradix.errors import ConfigError, Misuse
from hiradix.policy.admission import AdmissionPolicy
from hiradix.policy.admission_controller import AdmissionController
from hiradix.policy.uses import Finished
from hiradix.tree import Lock, Pages, RadixKey, Tier

ASK_AGAIN_S = 1.0  # where all that wait are held
_ANSWERED_S = 1e-9


@dataclass(frozen=True)
class ServerRates:
    """The rates of the simulated server, per second. chunk_tokens: computed between two choices of who is
    next."""

    machine: Machine = field(default_factory=Machine)
    decode_rate: float = 40.0
    chunk_tokens: int = 8192

    def __post_init__(self) -> None:
        if not 0 < self.decode_rate < float("inf"):
            raise ConfigError(f"--decode-rate must be > 0, got {self.decode_rate:g}")
        if self.chunk_tokens < 1:
            raise ConfigError(f"--chunk must be >= 1, got {self.chunk_tokens}")

    def price_s(self, missing: int, host: int, stored: int) -> float:
        """Seconds to a first token: blocks to compute, to load, and to fetch and load or, sooner, compute."""
        machine = self.machine
        compute_s = BLOCK / machine.prefill_rate
        load_s = BLOCK * machine.bytes_per_token / machine.host_rate
        fetch_s = min(compute_s, load_s + BLOCK * machine.bytes_per_token / machine.storage_rate)
        return machine.overhead_s + missing * compute_s + host * load_s + stored * fetch_s


@dataclass(slots=True)
class AgentCall:
    """A request from its arrival to its answer's end. remaining_s: of its service; None: it has not begun.
    short_s: seconds until it came in which whoever was next had no pages."""

    agent: int
    turn: int
    what: Turn
    session: str
    arrived_s: float
    key: RadixKey
    num_answer: int
    priced_at: int = -1
    price_s: float = 0.0
    short_s: float = 0.0
    remaining_s: float | None = None
    lock: Lock | None = None
    done: Lock | None = None
    pages: Pages | None = None


@dataclass
class Answered:
    """Per request in the order of first tokens: seconds waited, when each was due, and for how long of its wait
    whoever was next had no pages; tokens by tier.

    decisions: a digest of who was served when and found what.
    """

    wait_s: npt.NDArray[np.float64]
    due_s: npt.NDArray[np.float64]
    short_s: npt.NDArray[np.float64]
    prompt_tokens: int
    hit_tokens: dict[str, int]
    makespan_s: float
    decisions: str

    @property
    def hit_percent(self) -> float:
        """Hits in percent of all prompt tokens."""
        return 100 * sum(self.hit_tokens.values()) / max(self.prompt_tokens, 1)

    def waits(self) -> dict[str, float]:
        """Seconds to the first token: mean, percentiles, longest."""
        shown = {"mean": float(self.wait_s.mean())}
        shown |= {f"p{p}": float(np.quantile(self.wait_s, p / 100)) for p in (50, 95, 99)}
        return shown | {"longest": float(self.wait_s.max())}


class ClosedLoop:
    """Plays agents once. is_anonymous: nobody says of which session a request is, nor when one has ended;
    its session is then told by the prefix that it shares with another (see `Continuations`).
    """

    def __init__(
        self, agents: list[Agent], eviction: str, tiers: Tiers, policy: AdmissionPolicy, server: ServerRates,
        is_anonymous: bool = False,
    ):  # fmt: skip
        self.agents, self.server, self.policy = agents, server, policy
        self.simulated = SimulatedCache(eviction, tiers, BLOCK)
        self._is_anonymous = is_anonymous
        self._controller = AdmissionController(
            policy,
            lambda num_tokens: server.price_s(-(-num_tokens // BLOCK), 0, 0),
            lambda rid: self._price_s(self._waiting[rid]),
            lambda: self._now_s,
            is_preemptive=True,
        )
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._now_s = 0.0
        self._is_busy = False
        self._asked_again_s = 0.0
        self._waiting: dict[str, AgentCall] = {}
        self._ends: dict[str, RadixKey] = {}  # by session: its last prompt
        self._left: dict[str, None] = {}
        self._seen: set[int] = set()
        self._waits: list[tuple[float, float, float]] = []
        self._short_s = 0.0  # how long whoever was next has had no pages
        self._short_since_s: float | None = None
        self._hits = {"device": 0, "host": 0, "storage": 0}
        self._num_blocks = 0
        self._digest = hashlib.sha256()
        self._refuse_too_long(tiers)

    def _refuse_too_long(self, tiers: Tiers) -> None:
        most = max(len(turn.blocks) + _answer_blocks(turn) for agent in self.agents for turn in agent.turns)
        if most * BLOCK > tiers.device:
            raise ConfigError(f"--capacities: a request of {most * BLOCK} tokens, a device of {tiers.device}")

    @property
    def num_turns(self) -> int:
        return sum(len(agent.turns) for agent in self.agents)

    @property
    def waits(self) -> list[tuple[float, float, float]]:
        """One tuple (waited, due, short) for each first token until now, as in `Answered`."""
        return self._waits

    def play(self, gives_up: Callable[[ClosedLoop], bool] | None = None) -> Answered:
        """All turns of all agents; or as far as until `gives_up`, which is asked after every event."""
        for number, agent in enumerate(self.agents):
            self._at(agent.start_s, partial(self._arrive, number, 0))
        while self._events:
            self._now_s, _, happen = heapq.heappop(self._events)
            self.simulated.cache.tick()
            happen()
            if not self._is_busy and self._waiting:
                self._serve()
            if gives_up is not None and gives_up(self):
                return self._answered()
        if self._waiting:
            raise Misuse(f"{len(self._waiting)} requests were never served")
        return self._answered()

    def _answered(self) -> Answered:
        waits = np.array(self._waits, np.float64).reshape(-1, 3)
        hits = {tier: count * BLOCK for tier, count in self._hits.items()}
        return Answered(
            waits[:, 0], waits[:, 1], waits[:, 2], self._num_blocks * BLOCK, hits, self._now_s,
            self._digest.hexdigest(),
        )  # fmt: skip

    def _at(self, time_s: float, happen: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time_s, self._num_events, happen))

    # -- what happens -----------------------------------------------------------------------

    def _arrive(self, agent: int, turn: int) -> None:
        what = self.agents[agent].turns[turn]
        rid = f"{self.agents[agent].name}/{turn}"
        said: dict[str, Any] = {"session": self.agents[agent].name}
        if self._is_anonymous:
            said = {"names": what.blocks.tolist()}
        num_tokens = len(what.blocks) * BLOCK
        self._controller.add(rid, num_tokens, _answer_blocks(what) * BLOCK, **said)
        session = self._controller.session_of(rid)
        self._waiting[rid] = AgentCall(
            agent, turn, what, session, self._now_s, RadixKey(what.blocks), _answer_blocks(what),
            short_s=self._short_so_far_s,
        )  # fmt: skip

    def _serve(self) -> None:
        """Give the server to whoever is next and has room; ask again later where nobody may go."""
        self._short_s, self._short_since_s = self._short_so_far_s, None
        for rid in self._controller.order():
            call = self._waiting[rid]
            if call.remaining_s is None and not self._start(rid, call):
                self._short_since_s = self._now_s
                continue
            remaining_s = call.remaining_s or 0.0
            now_s = min(remaining_s, self.server.chunk_tokens / self.server.machine.prefill_rate)
            call.remaining_s = remaining_s - now_s
            self._is_busy = True
            self._at(self._now_s + now_s, partial(self._served, rid, call, now_s))
            return
        next_s = min(self._now_s + ASK_AGAIN_S, self.policy.next_due_s)
        if next_s < self._asked_again_s or self._asked_again_s <= self._now_s:
            self._asked_again_s = next_s
            self._at(next_s, lambda: None)

    def _served(self, rid: str, call: AgentCall, seconds: float) -> None:
        """A chunk was computed; with the last one the first token is there."""
        self._is_busy = False
        self._controller.served(rid, seconds)
        if (call.remaining_s or 0.0) > _ANSWERED_S:
            return
        del self._waiting[rid]
        due_s = self.policy.waiting[rid].deadline_s - call.arrived_s
        self._controller.first_token(rid)
        self._waits.append((self._now_s - call.arrived_s, due_s, self._short_so_far_s - call.short_s))
        self._share(call)
        self._at(
            self._now_s + call.what.output_tokens / self.server.decode_rate, partial(self._end, rid, call)
        )

    def _end(self, rid: str, call: AgentCall) -> None:
        """The answer is whole."""
        agent = self.agents[call.agent]
        self._release(call)
        self._controller.end(rid, call.what.stop, call.what.output_tokens)
        if call.turn + 1 < len(agent.turns):
            self._at(self._now_s + call.what.think_s, partial(self._arrive, call.agent, call.turn + 1))
        elif not self._is_anonymous:
            self._controller.forget(call.session)
            self._note_left()

    @property
    def _short_so_far_s(self) -> float:
        since_s = self._short_since_s
        return self._short_s + (0.0 if since_s is None else self._now_s - since_s)

    # -- the cache --------------------------------------------------------------------------

    def _price_s(self, call: AgentCall) -> float:
        """Seconds to its first token. Looked up again only where pages have come or gone."""
        if call.remaining_s is not None:
            return call.remaining_s
        counters = self.simulated.cache.counters
        at = counters.evicted_device + counters.evicted_host + counters.loaded
        if call.priced_at != at:
            call.priced_at = at
            match = self.simulated.cache.match(call.key)
            call.price_s = self._price_of(call, match.device_node.end, match.loadable_node.end)
        return call.price_s

    def _price_of(self, call: AgentCall, on_device: int, found: int) -> float:
        rest = call.what.blocks[found:].tolist()
        stored = 0
        if self.simulated.store is not None:
            stored = next((i for i, name in enumerate(rest) if name not in self._seen), len(rest))
        return self.server.price_s(len(rest) - stored, found - on_device, stored)

    def _start(self, rid: str, call: AgentCall) -> bool:
        """Fetch, load, lock and allocate for a request: all of it, or nothing and False."""
        simulated, cache, tree, key = self.simulated, self.simulated.cache, self.simulated.tree, call.key
        total = len(key) + call.num_answer
        hold = tree.lock(cache.match(key).device_node, Tier.DEVICE)
        short = total - hold.node.end
        has_room = short <= cache.supply.device_room()
        if has_room:
            self._controller.start(rid)
            self._left.pop(call.session, None)
            self._note_left()
            self._drop_left(short - simulated.device.available)
        tree.unlock(hold)
        if not has_room:
            return False
        fetched = simulated.fetch(key, rid)
        match = cache.match(key)
        on_device, node = match.device_node.end, match.device_node
        if match.loadable_node is not node and cache.load_back(match):
            node = match.loadable_node
            cache.start_loading()
        call.lock = tree.lock(node, Tier.DEVICE)
        cache.count_use(node)
        simulated.settle()
        short = total - node.end
        cache.make_room(short)
        call.pages = simulated.device.alloc(short)
        if call.pages is None:
            raise Misuse(f"{short} of {simulated.device.available} device blocks")
        self._ends[call.session] = key
        self._count(call, on_device, node.end, fetched)
        return True

    def _count(self, call: AgentCall, on_device: int, found: int, fetched: int) -> None:
        stored = min(fetched, found - on_device)
        host, missing = found - on_device - stored, len(call.key) - found
        call.price_s = call.remaining_s = self.server.price_s(missing, host, stored)
        self._num_blocks += len(call.key)
        for tier, count in (("device", on_device), ("host", host), ("storage", stored)):
            self._hits[tier] += count
        self._digest.update(b"%d %d %d %d " % (call.agent, call.turn, on_device, found))

    def _share(self, call: AgentCall) -> None:
        """A prompt is computed: its pages go to the tree."""
        if call.lock is None or call.pages is None:
            raise Misuse("a prompt without pages")
        num_prompt = len(call.key) - call.lock.node.end
        own, call.pages = call.pages[:num_prompt], call.pages[num_prompt:]
        call.done = self.simulated.cache.insert(call.key, own, at=call.lock)
        self._seen.update(call.what.blocks.tolist())
        self.simulated.settle()

    def _release(self, call: AgentCall) -> None:
        if call.lock is None or call.done is None or call.pages is None:
            raise Misuse("an answer without a prompt")
        simulated, tree = self.simulated, self.simulated.tree
        named = "" if self._is_anonymous else call.session
        ended = Finished(len(call.key) * BLOCK, call.what.output_tokens, session=named, stop=call.what.stop)
        simulated.cache.finished(call.key, call.done.node, ended)
        simulated.settle()
        tree.unlock(call.lock)
        tree.unlock(call.done)
        simulated.device.free(call.pages)

    # -- sessions that left -----------------------------------------------------------------

    def _note_left(self) -> None:
        self._left |= dict.fromkeys(self.policy.take_left())

    def _drop_left(self, short: int) -> None:
        """Let device pages go that only sessions use which left, as long as `short` are wanted."""
        for name in list(self._left):
            if short <= 0:
                return
            dropped = self.simulated.drop_tail(self._ends[name], short)
            if dropped < short:
                del self._left[name]
            short -= dropped


def _answer_blocks(turn: Turn) -> int:
    return turn.output_tokens // BLOCK + 1
