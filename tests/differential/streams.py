"""Random streams of moves, by seed. Moves name tokens only, so both sides can play them on their own.

All of them release locks in access order: first in, first out, or right before another look at the path.
    turns      conversations behind system prompts: chunked prefill, decode, finish, abort, eviction
    held       prefixes of a few trees of segments, inserted, looked at, held and released first in, first out
    anywhere   prompts that part anywhere, so that walks end inside nodes (see docs/differences.md, 1)
    inserted   of those, the insertions, looks and evictions
    stored     paths of segments over storage: inserted, evicted, forgotten, fetched again
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.differential.moves import Move

NAMESPACES = (None, None, "a", "b")
WHOLE = 10_000  # more tokens than any prompt has


@dataclass(frozen=True)
class Setup:
    """One cache.

    host_ratio: host pages per device page, 0 for no host tier; above 1, the peer insists.
    host_taken: host pages that somebody else has from the start (as prefetches in flight would).
    load_back_minimum: leave the peer its own.
    chunked: prompts may be prefilled in chunks (docs/differences.md, 5).
    window: tokens of a sliding window, 0 for none; its pool has `num_window_pages`.
    storage: a storage tier below the host.
    """

    page_size: int
    num_pages: int
    host_ratio: float = 0.0
    write_policy: str = "write_through"
    host_taken: int = 0
    load_back_minimum: bool = False
    chunked: bool = True
    window: int = 0
    num_window_pages: int = 0
    storage: bool = field(default=False, repr=False)


@dataclass(frozen=True)
class Stream:
    """A cache and what is done to it. name: for a failing test's message."""

    name: str
    setup: Setup
    moves: list[Move]

    def record(self) -> dict[str, Any]:
        return {"setup": asdict(self.setup), "moves": self.moves}


class _Prompts:
    """Draws prompts. Every token is new unless it is drawn from what was there before."""

    def __init__(self, rng: random.Random, page_size: int):
        self.rng, self.page_size = rng, page_size
        self._next = 1_000

    def fresh(self, count: int) -> list[int]:
        self._next += count
        return list(range(self._next - count, self._next))

    def pages(self, low: int, high: int) -> list[int]:
        return self.fresh(self.rng.randint(low, high) * self.page_size)


def turns(rng: random.Random, setup: Setup, num_moves: int) -> list[Move]:
    """Conversations: each turn sends all before it; a system prompt is inserted before each turn starts."""
    page_size, moves = setup.page_size, []
    prompts = _Prompts(rng, page_size)
    systems = [(rng.choice(NAMESPACES), prompts.pages(1, 3)) for _ in range(3)]
    talks = [[*rng.choice(systems), []] for _ in range(8)]  # namespace, system prompt, what followed
    running: dict[str, tuple[list[Any], list[int]]] = {}
    busy: set[int] = set()
    while len(moves) < num_moves:
        action = rng.random()
        idle = [i for i in range(len(talks)) if i not in busy]
        if action < 0.35 and idle and len(running) < 3:
            at = rng.choice(idle)
            namespace, system, tail = talks[at]
            tail = tail + prompts.fresh(rng.randint(1, 5 * page_size))
            moves.append(["insert", namespace, system])
            rid = f"{at}:{len(moves)}"
            moves.append(["start", rid, namespace, system + tail, rng.choice(_chunks(setup))])
            running[rid] = (talks[at], tail)
            busy.add(at)
        elif action < 0.75 and running:
            rid = rng.choice(list(running))
            if rng.random() < 0.4:
                moves.append(["more", rid, rng.choice(_chunks(setup))])
            else:
                new = prompts.fresh(rng.randint(1, 2 * page_size))
                moves.append(["decode", rid, new])
                running[rid][1].extend(new)
        elif action < 0.9 and running:
            rid = rng.choice(list(running))
            talk, tail = running.pop(rid)
            busy.discard(int(rid.split(":")[0]))
            moves.append(["finish", rid, rng.random() < 0.8])
            talk[2] = tail if len(tail) < 12 * page_size else []
        elif action < 0.96:
            moves.append(_eviction(rng, setup, 6))
    return moves + [["finish", rid, True] for rid in running] + _emptied(setup)


def held(rng: random.Random, setup: Setup, num_moves: int) -> list[Move]:
    """Paths of segments, inserted segment by segment; at most four are held, the oldest goes first."""
    page_size, moves, queue = setup.page_size, [], []
    prompts = _Prompts(rng, page_size)
    paths = [[(rng.choice(NAMESPACES)), prompts.pages(1, 3)] for _ in range(4)]
    roots = [(namespace, [segment]) for namespace, segment in paths]
    known = list(roots)
    for _ in range(14):
        namespace, segments = rng.choice(known)
        if len(segments) < 5:
            known.append((namespace, [*segments, prompts.pages(1, 3)]))
    while len(moves) < num_moves:
        namespace, segments = rng.choice(known)
        whole = [t for segment in segments for t in segment]
        action = rng.random()
        if action < 0.5:
            moves += _release_all(queue)  # an insertion is an access with a release at once
        if action < 0.3:
            for end in range(1, len(segments) + 1):
                moves.append(["insert", namespace, [t for segment in segments[:end] for t in segment]])
        elif action < 0.5:
            moves.append(["look", namespace, whole])
        elif action < 0.85:
            moves.append(["hold", f"h{len(moves)}", namespace, whole])
            queue.append(moves[-1][1])
            moves.append(["evict", rng.randint(1, 3) * page_size])
        else:
            moves.append(["evict", rng.randint(1, 8) * page_size])
        while queue and (len(queue) > 3 or rng.random() < 0.3):
            moves.append(["release", queue.pop(0)])
    return moves + _release_all(queue) + _emptied(setup)


def anywhere(rng: random.Random, setup: Setup, num_moves: int) -> list[Move]:
    """Prompts that share any number of tokens; another look comes right behind every release."""
    page_size, moves = setup.page_size, []
    prompts = _Prompts(rng, page_size)
    prompt = _branching(rng, prompts)
    holding: dict[str, tuple[str | None, list[int]]] = {}
    running: list[str] = []
    while len(moves) < num_moves:
        action, (namespace, tokens) = rng.random(), prompt()
        whole = tokens[: len(tokens) // page_size * page_size]
        if action < 0.25 and whole:
            moves.append(["insert", namespace, whole])
        elif action < 0.4:
            moves.append(["look", namespace, tokens])
        elif action < 0.5 and len(holding) < 3:
            name = f"h{len(moves)}"
            holding[name] = (namespace, tokens)
            moves.append(["hold", name, namespace, tokens])
        elif action < 0.58 and holding:
            name = rng.choice(list(holding))
            moves += [["release", name], ["look", *holding.pop(name)]]
        elif action < 0.72 and len(running) < 3 and len(tokens) > 1:
            running.append(f"r{len(moves)}")
            moves.append(["start", running[-1], namespace, tokens, rng.choice(_chunks(setup))])
        elif action < 0.84 and running:
            kind = rng.choice(["more", "decode"])
            what = WHOLE if kind == "more" else prompts.fresh(rng.randint(1, 2 * page_size))
            moves.append([kind, rng.choice(running), what])
        elif action < 0.93 and running:
            moves.append(["finish", running.pop(rng.randrange(len(running))), rng.random() < 0.8])
        elif action >= 0.93:
            moves.append(_eviction(rng, setup, 6))
    for name, what in holding.items():
        moves += [["release", name], ["look", *what]]
    return moves + [["finish", rid, True] for rid in running] + _emptied(setup)


def _branching(rng: random.Random, prompts: _Prompts) -> Callable[[], tuple[str | None, list[int]]]:
    """Draws (namespace, prompt), where each may go on from any point of one drawn before."""
    pool = [(namespace, prompts.pages(3, 8)) for namespace in NAMESPACES]

    def prompt() -> tuple[str | None, list[int]]:
        namespace, tokens = rng.choice(pool)
        tokens = tokens[: rng.randint(1, len(tokens))]
        if rng.random() < 0.7:
            tokens = tokens + prompts.fresh(rng.randint(1, 4 * prompts.page_size))
            if len(tokens) < 14 * prompts.page_size:
                pool.append((namespace, tokens))
        return namespace, tokens

    return prompt


def inserted(rng: random.Random, setup: Setup, num_moves: int) -> list[Move]:
    """As `anywhere` without locks: what write policies that count insertions can agree on."""
    kept = ("insert", "look", "evict")
    return [move for move in anywhere(rng, setup, 2 * num_moves) if move[0] in kept]


def stored(rng: random.Random, setup: Setup, num_moves: int) -> list[Move]:
    """Paths of segments; what was forgotten or has left is asked of storage now and then. One namespace."""
    prompts, moves = _Prompts(rng, setup.page_size), []
    paths = [prompts.pages(1, 3) for _ in range(3)]
    for _ in range(9):
        paths.append(rng.choice(paths) + prompts.pages(1, 3))
    known: set[int] = set()
    while len(moves) < num_moves:
        at, action = rng.randrange(len(paths)), rng.random()
        if action < 0.35:
            moves.append(["insert", None, paths[at]])
            known.add(at)
        elif action < 0.5:
            moves.append(["look", None, paths[at]])
        elif action < 0.65:
            moves.append(["evict", rng.randint(1, 6) * setup.page_size])
        elif action < 0.93:
            moves += [["fetch", None, paths[at]], ["load", None, paths[at]], ["look", None, paths[at]]]
        else:
            moves.append(["forget"])
    return [*moves, ["forget"], *(["fetch", None, paths[at]] for at in sorted(known))]


def _chunks(setup: Setup) -> list[int]:
    """Tokens to prefill at once."""
    return [setup.page_size, 3 * setup.page_size, WHOLE] if setup.chunked else [WHOLE]


def _release_all(queue: list[str]) -> list[Move]:
    moves: list[Move] = [["release", name] for name in queue]
    queue.clear()
    return moves


def _eviction(rng: random.Random, setup: Setup, most: int) -> Move:
    """Up to `most` pages; where there are windows, of those, of full data, or of both."""
    num_tokens = rng.randint(1, most) * setup.page_size
    if not setup.window:
        return ["evict", num_tokens]
    num_window_tokens = rng.randint(1, most) * setup.page_size
    return ["evict", *rng.choice([(num_tokens, 0), (0, num_window_tokens), (num_tokens, num_window_tokens)])]


def _emptied(setup: Setup) -> list[Move]:
    """Evict bit by bit until nothing is left: the whole order is seen."""
    page_size = setup.page_size
    windows: list[Move] = [["evict", 0, page_size] for _ in range(12)] if setup.window else []
    return [*windows, *(["evict", page_size] for _ in range(24)), ["evict", 10_000 * page_size]]


KINDS = {"turns": turns, "held": held, "anywhere": anywhere, "inserted": inserted, "stored": stored}


def draw(kind: str, setup: Setup, seeds: range, num_moves: int = 60) -> Iterator[Stream]:
    """One stream per seed."""
    for seed in seeds:
        rng = random.Random(f"{kind} {setup} {seed}")
        name = f"{kind}, seed {seed}, {setup}"
        yield Stream(name, setup, KINDS[kind](rng, setup, num_moves))
