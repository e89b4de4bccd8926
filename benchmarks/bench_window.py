"""Which window pages should go first, and what becomes of a leaf in which no match can end any more?

    python benchmarks/bench_window.py [--quick] [--seed N] [--out FILE]

Conversations over a few shared system prompts, returning by popularity, in a cache of full and window pages
with a window pool of several sizes. One line per case and rules: prompt tokens found, on the device and in
all, and the full pages that no match could reach, on average over the run. keep, bare, unusable: what becomes
of dead leaves (`DeadLeaf`), with windows in the order of last use. spare: windows that no boundary needs go
first (`Granularity.by_need`). `unlimited` has no windows: what full attention alone finds. Nothing is timed.
Ours are the rules that a cache has by default (`unusable, spare`). Writes build/bench/window.json.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from common import Report, Row  # noqa: E402

from hiradix.cache import HierarchicalCache, HostTier  # noqa: E402
from hiradix.memory import PageAllocator  # noqa: E402
from hiradix.policy.prefetch_policy import PrefetchLimits, PrefetchPolicy  # noqa: E402
from hiradix.policy.write_policy import WritePolicy  # noqa: E402
from hiradix.transfer import HiCacheController, PoolPair, Runtime, StepDriver  # noqa: E402
from hiradix.tree import FULL, Component, DeadLeaf, Granularity, Node, RadixKey, RadixTree, Tier  # noqa: E402

PAGE = 16
REACH = 16  # pages: a window of 256 tokens
FULL_PAGES = 6000
SHARES = (1.0, 0.4, 0.15)  # window pages for each full page
Rules = tuple[DeadLeaf, bool]  # what happens to dead leaves; whether spare window pages go first
RULES: dict[str, Rules] = {
    **{rule.value: (rule, False) for rule in DeadLeaf},
    "unusable, spare": (DeadLeaf.UNUSABLE, True),
}


@dataclass(frozen=True)
class Shape:
    num_layers: int = 1


class NoPool:
    """A pool of which only the bookkeeping is real."""

    device = "cpu"
    page_bytes = 1
    shape = Shape()

    def register_layer_transfer_counter(self, counter: Any) -> None: ...

    def page_views(self, page: int) -> list[memoryview]:
        raise NotImplementedError


class NoCopies:
    def copy_pages(self, *_: Any) -> None: ...


@dataclass
class Tally:
    """Tokens asked for and found, and samples of the full pages that nothing can reach."""

    asked: int = 0
    on_device: int = 0
    found: int = 0
    dead: list[int] = field(default_factory=list)

    def values(self) -> dict[tuple[str, str], float]:
        """By metric and unit."""
        return {
            ("on device", "%"): 100 * self.on_device / self.asked,
            ("found", "%"): 100 * self.found / self.asked,
            ("dead pages", "pages"): sum(self.dead) / max(1, len(self.dead)),
        }


def prompts(num_turns: int, seed: int) -> Iterator[list[int]]:
    """The prompt of each turn: a system prompt, what was said so far, and the new question."""
    rng = random.Random(seed)
    systems = [[1000 + s] * (PAGE * rng.randint(8, 40)) for s in range(6)]
    talks: list[list[int]] = []
    for turn in range(num_turns):
        if len(talks) < 30 or rng.random() < 0.25:
            talks.append(list(rng.choice(systems)))
        index = min(len(talks) - 1, int(rng.expovariate(1 / 60)))
        talk = talks[-1 - index]
        talk += [10_000 + turn] * rng.randint(PAGE, 24 * PAGE)
        yield list(talk)
        talk += [20_000 + turn] * rng.randint(PAGE, 16 * PAGE)  # the answer, cached with the next turn
        if len(talk) > 400 * PAGE:
            talks.remove(talk)


def make_cache(rules: Rules, window_pages: int, host_pages: int) -> HierarchicalCache:
    """A cache of full and window pages; without window pages, of full pages alone."""
    rule, by_need = rules
    counts = [FULL_PAGES, window_pages] if window_pages else [FULL_PAGES]
    components = (FULL, Component("window", REACH))[: len(counts)]
    tree = RadixTree(PAGE, components, granularity=Granularity(by_need=by_need), dead_leaf=rule)
    device = [PageAllocator(count, 1) for count in counts]
    if not host_pages:
        return HierarchicalCache(tree, device)
    driver = StepDriver()
    pairs = [PoolPair(NoPool(), NoPool(), NoCopies()) for _ in counts]
    controller = HiCacheController.over(pairs, Runtime(driver, driver.now))
    host = [PageAllocator(count * host_pages // FULL_PAGES) for count in counts]
    fetch = PrefetchPolicy.from_name("best_effort", PrefetchLimits(PAGE))
    tier = HostTier(host, controller, WritePolicy.from_name("write_through"), fetch)
    return HierarchicalCache(tree, device, tier)


def dead_pages(tree: RadixTree) -> int:
    """Full device pages at or above no boundary that a match could end in."""
    reached: set[Node] = set()
    leaves = [node for node in tree.nodes() if not node.children]
    for leaf in leaves:
        reached.update(tree.path(tree.boundaries(leaf).loadable_node))
    nodes = (node for node in tree.nodes() if node not in reached)
    return sum(len(node.device.pages) for node in nodes if node.device.pages is not None)


def play(cache: HierarchicalCache, num_turns: int, seed: int) -> Tally:
    """All turns, one after the other; every prompt is looked up, loaded, computed and given back."""
    tally, tree = Tally(), cache.tree
    for turn, tokens in enumerate(prompts(num_turns, seed)):
        cache.tick()
        key = RadixKey(tokens).page_aligned(PAGE)
        match = cache.match(key)
        tally.asked += len(key)
        tally.on_device += match.device_node.end * PAGE
        node = match.device_node
        if match.loadable_node is not node and cache.load_back(match) is not None:
            node = match.loadable_node
        tally.found += node.end * PAGE
        lock = tree.lock(node, Tier.DEVICE)
        need = len(key) // PAGE - node.end
        pages = [take(cache, component, need) for component in range(len(tree.components))]
        held = cache.insert(key, pages[0], at=lock, others=pages[1:])
        tree.unlock(lock)
        cache.start_loading()
        cache.drain(1e6)
        tree.unlock(held)
        if turn % 50 == 49:
            tally.dead.append(dead_pages(tree))
    cache.check()
    return tally


def take(cache: HierarchicalCache, component: int, num_pages: int) -> np.ndarray:
    cache.make_room(num_pages, component)
    pages = cache.supply.device_pools[component].alloc(num_pages)
    assert pages is not None, f"{num_pages} pages of component {component}"
    return pages


DEFAULT, UNLIMITED = "unusable, spare", "unlimited"


def measured(window_pages: int, host_pages: int, num_turns: int, seed: int, unlimited: Tally) -> list[Row]:
    """A window pool of one size under all rules."""
    found = {UNLIMITED: unlimited.values()}
    for name, rules in RULES.items():
        found[name] = play(make_cache(rules, window_pages, host_pages), num_turns, seed).values()
    ours = found.pop(DEFAULT)
    case = f"window pool {window_pages}" + (f", host {host_pages}" if host_pages else "")
    return [
        Row(case, metric, unit, value, {name: values[metric, unit] for name, values in found.items()})
        for (metric, unit), value in ours.items()
    ]


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--quick", action="store_true", help="a fortieth of the turns")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("build/bench/window.json"))
    options = parser.parse_args()
    num_turns = 150 if options.quick else 6000
    others = [name for name in RULES if name != DEFAULT]
    with Report(options.out, [UNLIMITED, *others], ours=DEFAULT) as report:
        report.about |= {"turns": num_turns, "full pages": FULL_PAGES, "page tokens": PAGE, "window": REACH}
        for host_pages in (0, 2 * FULL_PAGES):
            unlimited = play(make_cache(RULES["keep"], 0, host_pages), num_turns, options.seed)
            for share in SHARES:
                window_pages = int(FULL_PAGES * share)
                report.add(measured(window_pages, host_pages, num_turns, options.seed, unlimited))


if __name__ == "__main__":
    main()
