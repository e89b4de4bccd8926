"""Which cases `bench_tree.py` runs, and who takes part in each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

SEED, RUST, VLLM = "sglang-0.5.9", "sglang-0.5.23-rust", "vllm-0.32"
VLLM_HASHED = "vllm-0.32-hashed"  # prompts are hashed before, on another thread, as its engine does
PEERS = {  # name: worker module
    SEED: "sglang_0_5_9", RUST: "sglang_0_5_23", VLLM: "vllm_0_32", VLLM_HASHED: "vllm_0_32_hashed",
}  # fmt: skip
ALL_PEERS = tuple(PEERS)
UNITS = {
    "us, warm": "us", "us, cold": "us", "us/turn, warm": "us", "us/turn, cold": "us", "us/turn": "us",
    "us/turn, all threads": "us", "p50 us": "us", "p99 us": "us", "max us": "us",
    "hits": "share", "device hits": "share", "host hits": "share", "bytes/token": "bytes",
    "bytes/node": "bytes",
}  # fmt: skip
ROUNDS = 5


@dataclass(frozen=True)
class Ours:
    """One way in which ours takes part: a row `case + suffix (form, policy)`. kind: if not the peers' case.

    compiled: with the tree compiled by mypyc, instead of run by Python. policy: which the tree evicts by.
    """

    suffix: str = ""
    bare: bool = False
    kind: str = ""
    compiled: bool = False
    policy: str = "lru"

    @property
    def name(self) -> str:
        """What is behind the case in a row of ours."""
        return f"{self.suffix} ({'compiled' if self.compiled else 'plain'}, {self.policy})"


DROP_IN, GHD, BARE = Ours(), Ours(policy="ghd"), Ours(", bare tree", bare=True)
BARE_MATCH = Ours(", page ids (bare tree)", bare=True)
CONTINUED = Ours(", continued", kind="continued")
LOGGED = Ours(", append-only log", kind="logged")
BARE_LOGGED = Ours(", append-only log, bare tree", bare=True, kind="logged")
BARE_CONTINUED = Ours(", continued, bare tree", bare=True, kind="continued")


@dataclass(frozen=True)
class Planned:
    """One case, who runs it, and in how many rounds."""

    name: str
    kind: str
    options: dict[str, object]
    peers: tuple[str, ...] = (SEED, RUST)
    ours: tuple[Ours, ...] = (DROP_IN,)
    rounds: int = ROUNDS


def plan(quick: bool, full: bool, compiled: bool) -> list[Planned]:
    """quick: a few seconds' worth of everything small. full: also what takes peers minutes.

    compiled: each of our rows a second time, with the compiled tree.
    """
    turns = [*_multi_turn(quick), *_host_tier(quick, full), *_turn_at(quick, full)]
    cases = [*_memory(quick), *turns, *_match(quick, full), *_insert(quick), *_evict(quick, full)]
    cases += _conservation()
    if compiled:
        cases = [replace(case, ours=(*case.ours, *map(_compiled, case.ours))) for case in cases]
    if not quick:
        return cases
    return [  # one process of ours at a time; the peers stand beside the first way of each case
        replace(case, rounds=1, ours=(how,), peers=() if number else case.peers)
        for case in cases
        if case.options["page"] == 64
        for number, how in enumerate(case.ours)
    ]


def _compiled(how: Ours) -> Ours:
    return replace(how, compiled=True)


def _memory(quick: bool) -> Iterator[Planned]:
    if quick:
        return
    for page in (1, 64):
        options: dict[str, object] = {"page": page}
        peers = (SEED, RUST, VLLM) if page == 64 else (SEED, RUST)
        yield Planned(f"memory device tier, page {page}", "memory", options, peers, rounds=1)
        tiers = {"page": page, "ratio": 1.5}
        yield Planned(f"memory with host tier, page {page}", "memory-host", tiers, rounds=1)


def _multi_turn(quick: bool) -> Iterator[Planned]:
    count = 20 if quick else 1000
    for page in (1, 64):
        name = f"multi-turn {count} x 8, page {page}"
        options: dict[str, object] = {"page": page, "count": count, "turns": 8}
        peers = ALL_PEERS if page == 64 else (SEED, RUST)
        yield Planned(name, "multi-turn", options, peers, (DROP_IN, GHD, BARE))
        fewer = options | {"count": 20 if quick else 200}
        name = f"multi-turn {fewer['count']} x 8, page {page}, request calls"
        yield Planned(name, "requests", fewer, ours=(DROP_IN, GHD))


def _conservation() -> Iterator[Planned]:
    yield Planned("conservation check of a step, page 64", "conservation", {"page": 64}, peers=())


def _host_tier(quick: bool, full: bool) -> Iterator[Planned]:
    count = 1000 if full else 20 if quick else 300
    for page in (1, 64):
        for kind in ("round robin", "sliding"):
            options: dict[str, object] = {"page": page, "kind": kind, "count": count}
            name = f"host-tier {kind} {count} x 8, page {page}"
            yield Planned(name, "host-tier", options, ours=(DROP_IN, GHD))


def _turn_at(quick: bool, full: bool) -> Iterator[Planned]:
    for prefix in (8192,) if quick else (8192, 131072, 1048576):
        options: dict[str, object] = {"page": 64, "prefix": prefix, "rounds": ROUNDS}
        peers = ALL_PEERS if full or prefix < 1 << 20 else (RUST, VLLM, VLLM_HASHED)
        name = f"turn-at {prefix}, page 64"
        ways = (DROP_IN, BARE, LOGGED, BARE_LOGGED, CONTINUED, BARE_CONTINUED)
        yield Planned(name, "turn-at", options, peers, ways)


def _match(quick: bool, full: bool) -> Iterator[Planned]:
    for length in (8192,) if quick else (8192, 131072):
        for page in (1, 64):
            for chain in (0, 64):
                shape = f"chain of {chain}" if chain else "one node"
                name = f"match {length} tokens, {shape}, page {page}"
                options: dict[str, object] = {"page": page, "length": length, "chain": chain}
                peers: tuple[str, ...] = ALL_PEERS if page == 64 and not chain else (SEED, RUST)
                if chain and length > 8192 and not full:
                    peers = (RUST,)  # 0.5.9 takes 40 s to build it
                yield Planned(name, "match", options, peers, (DROP_IN, BARE_MATCH))


def _insert(quick: bool) -> Iterator[Planned]:
    for suffix in (1024,) if quick else (1024, 8192, 32768):
        for page in (1, 64):
            options: dict[str, object] = {"page": page, "suffix": suffix, "rounds": ROUNDS}
            peers = ALL_PEERS if page == 64 else (SEED, RUST)
            name = f"insert {suffix} under 4096, page {page}"
            yield Planned(name, "insert", options, peers)


def _evict(quick: bool, full: bool) -> Iterator[Planned]:
    for leaves in (1000,) if quick else (10_000, 100_000, *([1_000_000] if full else [])):
        for page in (1, 64):
            if leaves > 10_000 and page == 1 and not full:
                continue
            options: dict[str, object] = {"page": page, "leaves": leaves}
            peers: tuple[str, ...] = ALL_PEERS if page == 64 else (SEED, RUST)
            if leaves == 1_000_000:
                peers = ()  # they need minutes more
            yield Planned(f"evict 1000 tokens of {leaves} leaves, page {page}", "evict", options, peers)
