"""Seeded traces, invented: for robustness, never for a claim about real traffic. One hour each.

A kind is a script of events: time, path of block contents, tokens missing from the last block (at least one),
answer tokens.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from hiradix.apps.traces.trace import Namer, Trace, TraceRequest
from hiradix.errors import ConfigError

BLOCK = 512
HOUR_S = 3600.0


class _Event(NamedTuple):
    time_s: float
    path: tuple[Hashable, ...]
    missing: int
    answer: int


class _Span(NamedTuple):
    """The time in which a script runs, and how many of its sessions start per second."""

    rate: float
    start_s: float = 0.0
    length_s: float = HOUR_S


class _Growth(NamedTuple):
    """The growth of a conversation: P(another turn | turns), think time, blocks at first and per turn."""

    goes_on: Callable[[int], float]
    think_s: float
    spread: float
    first: float
    turn: float


Script = Callable[[random.Random, _Span], list[_Event]]


def _chain(tag: Hashable, count: int, start: int = 0) -> list[Hashable]:
    return [(tag, k) for k in range(start, start + count)]


def _starts(rng: random.Random, span: _Span) -> list[float]:
    times, at = [], 0.0
    while (at := at + rng.expovariate(span.rate)) < span.length_s:
        times.append(span.start_s + at)
    return times


def _talk(
    rng: random.Random, time_s: float, above: Sequence[Hashable], tag: Hashable, grow: _Growth
) -> list[_Event]:
    """One conversation below the blocks `above`."""
    blocks = [*above, *_chain(tag, max(1, int(rng.lognormvariate(math.log(grow.first), 0.8))))]
    events: list[_Event] = []
    for turn in range(60):
        path = (*blocks[:-1], (tag, "open", turn))
        events.append(_Event(time_s, path, rng.randrange(1, BLOCK), rng.randrange(50, 900)))
        if rng.random() > grow.goes_on(turn + 1):
            break
        time_s += rng.lognormvariate(math.log(grow.think_s), grow.spread)
        blocks += _chain(tag, max(1, int(rng.expovariate(1 / grow.turn)) + 1), len(blocks))
    return events


def chat(rng: random.Random, span: _Span) -> list[_Event]:
    """Four system prompts; few conversations are long, most end after one turn."""
    systems = [_chain(("system", s), 2 + s) for s in range(4)]
    events: list[_Event] = []
    for i, time_s in enumerate(_starts(rng, span)):
        keen = rng.random() < 0.15
        goes_on = (lambda turn: 0.9) if keen else (lambda turn: 0.35 if turn == 1 else 0.6)
        system = systems[min(3, int(rng.expovariate(1)))]
        events += _talk(rng, time_s, system, ("chat", i), _Growth(goes_on, 60, 0.9, 6, 3))
    return events


def agents(rng: random.Random, span: _Span) -> list[_Event]:
    """Tool loops with short pauses, some long; now and then a sub-agent from the system prompt."""
    systems = [_chain(("tools", s), 16 + 8 * s) for s in range(5)]
    events: list[_Event] = []
    for i, time_s in enumerate(_starts(rng, span)):
        system, tag = systems[rng.randrange(5)], ("agent", i)
        blocks = [*system, *_chain(tag, 3)]
        for step in range(int(rng.lognormvariate(math.log(12), 0.8)) + 1):
            path = (*blocks[:-1], (tag, "open", step))
            events.append(_Event(time_s, path, rng.randrange(1, BLOCK), rng.randrange(30, 400)))
            if rng.random() < 0.05:
                below = _Growth(lambda turn: 0.85, 5, 0.6, 4, 2)
                events += _talk(rng, time_s + 2, system, (tag, "below", step), below)
            is_long = rng.random() >= 0.93
            time_s += rng.lognormvariate(math.log(150 if is_long else 6), 0.8)
            blocks += _chain(tag, 1 + int(rng.expovariate(1 / 2.5)), len(blocks))
    return events


def rag(rng: random.Random, span: _Span) -> list[_Event]:
    """Questions below documents; which documents are popular drifts twice."""
    sizes = [int(rng.lognormvariate(math.log(20), 0.6)) + 2 for _ in range(3000)]
    weights = list(itertools.accumulate(1 / (k + 1) for k in range(len(sizes))))
    order, phase = list(range(len(sizes))), 0
    rng.shuffle(order)
    events: list[_Event] = []
    for i, time_s in enumerate(_starts(rng, span)):
        if time_s - span.start_s > span.length_s * (phase + 1) / 3:
            phase += 1
            rng.shuffle(order)
        which = bisect.bisect(weights, rng.random() * weights[-1]) % len(sizes)
        document = order[which]
        path = (("rag", 0), *_chain(("document", document), sizes[document]), ("question", i))
        events.append(_Event(time_s, path, rng.randrange(1, BLOCK), 200))
    return events


def best_of_n(rng: random.Random, span: _Span) -> list[_Event]:
    """Chat, and bursts of the same prompt."""
    events = chat(rng, span._replace(rate=span.rate * 0.7))
    for i, time_s in enumerate(_starts(rng, span._replace(rate=span.rate * 0.15))):
        path = tuple(_chain(("burst", i), int(rng.lognormvariate(math.log(10), 0.7)) + 1))
        for _ in range(rng.randrange(3, 9)):
            events.append(_Event(time_s, path, 5, 500))
            time_s += rng.expovariate(1 / 3)
    return events


def loop(rng: random.Random, span: _Span) -> list[_Event]:
    """Passes over 500 documents, in the same order each time."""
    sizes = [int(rng.lognormvariate(math.log(25), 0.4)) + 2 for _ in range(500)]
    events = []
    for i in range(int(span.length_s * span.rate)):
        d = i % len(sizes)
        path = (*_chain(("loop", d), sizes[d]), ("ask", i))
        events.append(_Event(span.start_s + i / span.rate, path, 10, 100))
    return events


def flip(rng: random.Random, span: _Span) -> list[_Event]:
    """Small first prompts go on in the first half, large ones in the second."""
    events: list[_Event] = []
    for i, time_s in enumerate(_starts(rng, span)):
        is_big = rng.random() < 0.5
        often = is_big == (time_s > span.start_s + span.length_s / 2)
        grow = _Growth((lambda turn: 0.85) if often else (lambda turn: 0.08), 90, 0.7, 20 if is_big else 3, 2)
        events += _talk(rng, time_s, [("flip", 0)], ("flip", i), grow)
    return events


def phases(rng: random.Random, span: _Span) -> list[_Event]:
    """Agents, then chat, then documents."""
    third = span.length_s / 3
    events = agents(rng, _Span(0.12, span.start_s, third))
    events += chat(rng, _Span(1.2, span.start_s + third, third))
    return events + rag(rng, _Span(1.6, span.start_s + 2 * third, third))


KINDS: dict[str, tuple[Script, float]] = {
    "agents": (agents, 0.12),
    "chat": (chat, 1.3),
    "rag": (rag, 1.6),
    "best-of-n": (best_of_n, 1.3),
    "loop": (loop, 1.2),
    "flip": (flip, 1.2),
    "phases": (phases, 1.0),
}


def generate(kind: str, seed: int, limit: int | None = None) -> Trace:
    """A synthetic trace; equal arguments give equal traces. ConfigError for an unknown kind."""
    if kind not in KINDS:
        raise ConfigError(f"synthetic:{kind} is not one of {', '.join(KINDS)}")
    script, rate = KINDS[kind]
    events = sorted(script(random.Random(f"{kind}:{seed}"), _Span(rate)), key=lambda e: e.time_s)
    namer = Namer()
    calls = []
    for event in events[:limit]:
        tokens = len(event.path) * BLOCK - event.missing
        calls.append(TraceRequest(event.time_s, tokens, event.answer, namer.blocks(list(event.path[:-1]))))
    return Trace(f"{kind} (synthetic)", f"seed {seed}", BLOCK, tuple(calls), is_synthetic=True)
