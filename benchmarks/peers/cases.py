"""The cases a worker can run. A case is prepared once and measured in rounds, in turn with other peers.

`measure` returns {metric: values}; the values of all rounds are reduced to their median. Every peer sees the
same prompts in the same order. A case has a process of its own.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import workloads
from timed import HostTurns

TURN = 512  # tokens of the turn that a growing conversation adds
SHARED = 4096  # prefix that `insert` shares
LEAF = 64  # tokens of an `evict` leaf
EVICTED = 1000  # tokens of one `evict` call
PER_ROUND = 2  # turns of a growing conversation
REPEATS = 5  # calls in a row of what takes microseconds
OTHER_BYTES = 64 << 20  # more than the caches of a core: written between cold calls

Measured = dict[str, list[float]]


def settled() -> None:
    """Let the garbage collector see only what comes from here on."""
    gc.collect()
    gc.freeze()


_other = np.zeros(0, np.uint8)


def others_work() -> None:
    """What a server does between two turns of one conversation: other memory goes through the caches."""
    global _other
    if not len(_other):
        _other = np.zeros(OTHER_BYTES, np.uint8)
    np.add(_other, 1, out=_other)


class Case:
    """make: gives the adapter. Subclasses' __init__ prepares."""

    def measure(self) -> Measured:
        raise NotImplementedError


class MultiTurn(Case):
    """Conversations in turn, a turn is its whole prompt: match, lock, insert, unlock. New tree each round."""

    def __init__(self, make: Callable[[], Any], page: int, count: int, turns: int) -> None:
        self._peer, self._page = make(), page
        self._told, self._steps = workloads.conversations(count, turns), workloads.round_robin(count, turns)
        total = sum(len(prompts[-1]) for prompts in self._told)
        self._num_tokens = (total // page + count * 4) * page

    def _one(self, prompt: Any) -> tuple[int, float]:
        return self._peer.timed_turn(prompt[: len(prompt) // self._page * self._page])

    def round(self) -> Iterator[tuple[int, float]]:
        """Per turn of a round, cached tokens and seconds."""
        self._peer.new(self._page, self._num_tokens)
        settled()
        for i, turn in self._steps:
            yield self._one(self._told[i][turn])

    def costs(self) -> Iterator[float]:
        """Seconds of each turn of a round."""
        return (seconds for _, seconds in self.round())

    def measure(self) -> Measured:
        cached, seconds = zip(*self.round())
        asked = sum(len(self._told[i][turn]) for i, turn in self._steps)
        return {"us/turn": [sum(seconds) / len(seconds) * 1e6], "hits": [sum(cached) / asked]}


class Requests(MultiTurn):
    """The same as a scheduler's calls: match, lock, cache_unfinished_req, cache_finished_req."""

    def _one(self, prompt: Any) -> tuple[int, float]:
        return self._peer.timed_request(prompt, 100)


class HostTier(Case):
    """Turns with a host tier.

    round robin: the host holds everything and the device little, so every turn loads back.
    sliding: conversations come and go, and the host evicts too.
    """

    def __init__(self, make: Callable[[], Any], page: int, kind: str, count: int) -> None:
        self._make, self._page = make, page
        turns = 8
        if kind == "sliding":
            self._steps = workloads.sliding(count * turns, turns, count)
            self._device, self._ratio = 200 * count, 3.0
        else:
            self._steps = workloads.round_robin(count, turns)
            self._device, self._ratio = 400 * count, 10.0
        self._told = workloads.conversations(max(i for i, _ in self._steps) + 1, turns)

    def round(self) -> Iterator[HostTurns]:
        """After each turn of a round, what all so far cost and found."""
        peer, turns, page = self._make(), HostTurns(), self._page
        peer.new(page, self._device // page * page, self._ratio)
        settled()
        for i, turn in self._steps:
            prompt = self._told[i][turn]
            peer.turn(prompt[: len(prompt) // page * page], turns)
            yield turns
        peer.close()

    def costs(self) -> Iterator[float]:
        """Seconds of each turn of a round."""
        return (turns.seconds[-1] for turns in self.round())

    def measure(self) -> Measured:
        *_, turns = self.round()
        seconds = sorted(turns.seconds)
        count = len(seconds)
        return {
            "us/turn": [sum(seconds) / count * 1e6],
            "us/turn, all threads": [turns.all_threads_s / count * 1e6],
            "p50 us": [seconds[count // 2] * 1e6],
            "p99 us": [seconds[count * 99 // 100] * 1e6],
            "max us": [seconds[-1] * 1e6],
            "device hits": [turns.num_device / turns.num_tokens],
            "host hits": [turns.num_host / turns.num_tokens],
        }


def grow_chain(peer: Any, ids: array, node_tokens: int) -> None:
    """Cache `ids` as a chain of nodes, or as one if `node_tokens` is 0. Cut from the back, which is cheap."""
    peer.store(ids)
    if node_tokens:
        for end in range(len(ids) - node_tokens, 0, -node_tokens):
            peer.cut(ids[:end])


class Conservation(Case):
    """The check of every step that no page is lost, in a cache of 200 conversations; many calls, for one."""

    def __init__(self, make: Callable[[], Any], page: int) -> None:
        self._peer = make()
        prompts = [told[-1] for told in workloads.conversations(200, 8)]
        prompts = [prompt[: len(prompt) // page * page] for prompt in prompts]
        self._peer.new(page, sum(map(len, prompts)))
        for prompt in prompts:
            self._peer.store(prompt)
        settled()

    def measure(self) -> Measured:
        return {"us, warm": [self._peer.timed_conservation(1000) * 1e3]}


class TurnAt(Case):
    """One more turn of a conversation whose prompt is cached as a chain of its turns; each round adds some.

    warm: right after a match of the same prompt. cold: after other memory has gone through the caches.
    """

    def __init__(self, make: Callable[[], Any], page: int, prefix: int, rounds: int) -> None:
        self._peer, self._num_cached = make(), prefix
        self._ids = workloads.prompt(prefix + (2 * rounds * PER_ROUND + 2) * TURN)
        self._peer.new(page, len(self._ids) + 4 * TURN)
        grow_chain(self._peer, self._ids[:prefix], TURN)
        settled()

    def measure(self) -> Measured:
        return {
            f"us/turn, {how}": [self._next(how == "warm") * 1e6 for _ in range(PER_ROUND)]
            for how in ("warm", "cold")
        }

    def _next(self, is_warm: bool) -> float:
        if is_warm:
            self._peer.timed_match(self._ids[: self._num_cached])
        else:
            others_work()
        return self._turn()

    def _turn(self) -> float:
        ids = self._ids[: self._num_cached + TURN]
        num_cached, seconds = self._peer.timed_turn(ids)
        assert num_cached == self._num_cached, f"{num_cached} of {self._num_cached}"
        self._num_cached += TURN
        return seconds


class Logged(TurnAt):
    """The same from a `TokenLog`, which knows where its tokens were found last."""

    def __init__(self, make: Callable[[], Any], page: int, prefix: int, rounds: int) -> None:
        super().__init__(make, page, prefix, rounds)
        self._peer.keep_log()


class Continued(TurnAt):
    """The same by a request that holds its prefix locked."""

    def __init__(self, make: Callable[[], Any], page: int, prefix: int, rounds: int) -> None:
        super().__init__(make, page, prefix, rounds)
        self._peer.begin_chunks(self._ids[:prefix])

    def _turn(self) -> float:
        self._num_cached += TURN
        return self._peer.timed_chunk(self._ids[: self._num_cached])


class Match(Case):
    """Match of a prompt that is cached whole, with its slots. chain: tokens per node, 0: one node.

    warm: the same prompt again. cold: after other memory has gone through the caches.
    """

    def __init__(self, make: Callable[[], Any], page: int, length: int, chain: int) -> None:
        self._peer, self._ids = make(), workloads.prompt(length)
        self._peer.new(page, length + 64 * page)
        grow_chain(self._peer, self._ids, chain)
        self._peer.timed_match(self._ids)
        settled()

    def measure(self) -> Measured:
        self._peer.timed_match(self._ids)
        warm = [self._peer.timed_match(self._ids) * 1e6 for _ in range(REPEATS)]
        return {"us, warm": warm, "us, cold": [self._cold() * 1e6 for _ in range(REPEATS)]}

    def _cold(self) -> float:
        others_work()
        return self._peer.timed_match(self._ids)


class Insert(Case):
    """Insert of a new suffix below a shared prefix, which was just matched; another suffix each time."""

    def __init__(self, make: Callable[[], Any], page: int, suffix: int, rounds: int) -> None:
        self._peer, self._suffix, self._count = make(), suffix, 0
        self._shared = workloads.prompt(SHARED)
        self._peer.new(page, SHARED + (REPEATS * rounds + 8) * (suffix + page))
        self._peer.store(self._shared)
        settled()

    def measure(self) -> Measured:
        took = []
        for _ in range(REPEATS):
            self._count += 1
            suffix = workloads.prompt.__wrapped__(self._suffix, seed=100 + self._count)
            took.append(self._peer.timed_insert(self._shared + suffix, SHARED))
        return {"us, warm": [seconds * 1e6 for seconds in took]}


class Evict(Case):
    """evict(1000) of a flat tree of 64-token leaves, several in a row."""

    def __init__(self, make: Callable[[], Any], page: int, leaves: int) -> None:
        self._peer = make()
        self._peer.new(page, leaves * LEAF)
        for row in workloads.leaves(leaves, LEAF):
            self._peer.store(row.tolist())
        settled()

    def measure(self) -> Measured:
        return {"us, warm": [self._peer.timed_evict(EVICTED) * 1e6 for _ in range(REPEATS)]}


class Memory(Case):
    """Growth of a process per token and per node: two sizes of node give two equations.

    Each size is measured in a fresh process (`memory_point.py`): one that has done other work has free memory
    to fill first.
    """

    def __init__(self, make: Callable[[], Any], page: int, ratio: float = 0.0) -> None:
        self._make, self._page, self._ratio = make, page, ratio

    def measure(self) -> Measured:
        small, large = self._page, 8 * LEAF
        of_small, of_large = self._growth(small, 4_000), self._growth(large, 1_000)
        per_token = (of_large - of_small) / (large - small)
        return {"bytes/token": [per_token], "bytes/node": [of_small - per_token * small]}

    def _growth(self, size: int, count: int) -> float:
        """Bytes per node of `size` tokens."""
        point = [str(value) for value in (self._page, size, count, self._ratio)]
        adapter = [self._make.__module__, self._make.__name__]  # type: ignore[attr-defined]
        command = [sys.executable, str(Path(__file__).with_name("memory_point.py")), *adapter, *point]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
        return float(done.stdout.split()[-1])


CASES: dict[str, tuple[str, type[Case]]] = {  # kind: (which adapter, case)
    "multi-turn": ("TREE", MultiTurn),
    "requests": ("REQUESTS", Requests),
    "host-tier": ("HOST", HostTier),
    "turn-at": ("TREE", TurnAt),
    "conservation": ("TREE", Conservation),
    "logged": ("TREE", Logged),
    "continued": ("TREE", Continued),
    "match": ("TREE", Match),
    "insert": ("TREE", Insert),
    "evict": ("TREE", Evict),
    "memory": ("TREE", Memory),
    "memory-host": ("HOST", Memory),
}
