"""What has a request that is let go before storage was read, and what do boundaries on the way cost?

    python benchmarks/bench_boundaries.py [--quick] [--out FILE]

A prompt of 512 pages of a model with windows, stored at the end of each of its turns of 16 pages, is read
back under `best_effort` and let go after a part of the reading, 40 parts drawn evenly. What is read counts in
full pages; a window page is as long as one of them, or as five (a fifth of the layers looks back over all).
`hits`: pages of the prompt that can be used when the request is let go, on average. `looking back` is another
way: nothing is read on the way, and what has come is completed by its window afterwards. The request that was
let go has nothing of that; `later` is what another one could use when that window, too, is read. Nothing is
timed. Ours is the step that is taken; the peers are the other ways. Writes build/bench/boundaries.json.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from common import Report, Row  # noqa: E402

from hiradix.cache.boundaries import WINDOWS_SHARE, pages_of_a_step  # noqa: E402
from hiradix.policy.no_regret import NoRegret  # noqa: E402
from hiradix.transfer import Runtime, TransferLimits  # noqa: E402
from hiradix.tree import RadixKey  # noqa: E402
from tests.cache.component_storage import StoredWorld  # noqa: E402
from tests.cache.component_world import Setup  # noqa: E402
from tests.cache.test_components import serve  # noqa: E402

NUM_PAGES, TURN, NUM_STOPS, BATCH = 512, 16, 40, 8
NEVER = 1 << 30
SHARES = (2, 4, 8, 16, 32)
KEY = RadixKey(list(range(NUM_PAGES)))


class World(StoredWorld):
    """Room for all of it, and storage calls of a few pages."""

    def _runtime(self) -> Runtime:
        limits = TransferLimits(batch_pages=BATCH)
        return Runtime(driver=self.driver, clock=self.driver.now, limits=limits)


class LetGo(NamedTuple):
    hits: int
    read: float
    later: int


def stored() -> World:
    """A world whose storage has the prompt."""
    world = World(Setup(device_pages=(2000, 2000, 20), host_pages=(1000, 1000, 20)), 1)
    assert world.cache.prefetcher is not None
    world.cache.no_regret = world.cache.prefetcher.reads.no_regret = NoRegret(False)
    world.hashes(KEY)
    for end in range(TURN, NUM_PAGES + 1, TURN):
        serve(world, list(range(end)))
    return world


def let_go(world: World, step_pages: int, ratio: int, after: float) -> LetGo:
    """Read the prompt back, and let its request go when so many full pages' worth of it are read."""

    def read() -> float:
        return sum(count * (ratio if component else 1) for component, count in world.gets)

    world.restart()
    world.gets.clear()
    world.set_policy("best_effort")
    world.set_step(step_pages)
    handle = world.prefetch(KEY)
    while read() < after and world.driver.step():
        world.cache.tick()
    world.cache.tick()
    hits = world.cache.match(KEY).loadable_node.end
    later = sum(count for component, count in world.gets if not component) // TURN * TURN
    assert world.cache.prefetcher is not None
    world.cache.prefetcher.progress(handle)
    world.settle()
    return LetGo(hits, read(), later)


TAKEN = f"1/{WINDOWS_SHARE}"
WAYS = ("looking back", *(f"1/{n}" for n in SHARES))


def measured(world: World, ratio: int, num_stops: int) -> list[Row]:
    """Rows of a window each of whose pages is as long as `ratio` full ones."""
    window = world.components[1]
    least = NUM_PAGES + window.reach * ratio
    draw = random.Random(3)
    stops = [draw.uniform(0, least) for _ in range(num_stops)]
    values: dict[tuple[str, str], dict[str, float]] = {}
    for name in WAYS:
        step = NEVER if name == "looking back" else max(BATCH, int(name[2:]) * window.reach * ratio)
        found = [let_go(world, step, ratio, stop) for stop in stops]
        whole = let_go(world, step, ratio, NEVER)
        assert whole.hits == NUM_PAGES, whole
        of_way = {
            ("hits when let go", "pages"): statistics.mean(one.hits for one in found),
            ("hits later, with the window", "pages"): statistics.mean(one.later for one in found),
            ("read for all of it", "pages"): whole.read,
            ("read more than least", "%"): 100 * (whole.read / least - 1),
        }
        for metric, value in of_way.items():
            values.setdefault(metric, {})[name] = float(value)
    case = f"window of {window.reach} pages, each {ratio} full ones"
    rows = [Row(case, metric, unit, each.pop(TAKEN), each) for (metric, unit), each in values.items()]
    chosen = pages_of_a_step(world.components, (1, ratio), BATCH)
    return [*rows, Row(case, "step that is taken", "pages", float(chosen))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two parts of the reading in place of 40")
    parser.add_argument("--out", type=Path, default=Path("build/bench/boundaries.json"))
    args = parser.parse_args()
    with Report(args.out, [way for way in WAYS if way != TAKEN], ours=TAKEN) as report:
        world = stored()
        for ratio in (1, 5):
            report.add(measured(world, ratio, 2 if args.quick else NUM_STOPS))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
