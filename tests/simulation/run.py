"""Plays seeds: `play` is what the tests call.

python -m tests.simulation.run SEED [MOVES]     one seed, again
python -m tests.simulation.run hunt SEEDS       seeds from 0 until one fails; exit status 1 if one did
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable

from tests.simulation.memory import Broken
from tests.simulation.world import World

MOVES = 2000
CHECK_EVERY = 1000


def play(seed: int, moves: int = MOVES) -> World:
    """One seed's life, to its end. Raises AssertionError that names the seed and the move."""
    world = None
    try:
        world = World(seed)
        for number in range(1, moves + 1):
            world.move()
            if number % CHECK_EVERY == 0:
                world.check()
        world.check()
        world.drain()
    except (Exception, Broken) as error:
        where = f"python -m tests.simulation.run {seed} {moves}"
        at, setup = ("the start", "") if world is None else (f"move {world.num_moves}", world.setup)
        raise AssertionError(f"{at} of [{where}]: {type(error).__name__}: {error}\n{setup}") from error
    world.tally(world.totals)
    return world


def first_failure(seeds: Iterable[int]) -> str:
    """What the first failing seed says, or nothing."""
    for seed in seeds:
        try:
            play(seed)
        except AssertionError as error:
            return str(error)
    return ""


def main(arguments: list[str]) -> int:
    logging.getLogger("hiradix").setLevel(logging.CRITICAL)
    if arguments[0] == "hunt":
        message = first_failure(range(int(arguments[1])))
        print(message or "no seed failed")
        return int(bool(message))
    seed, moves = int(arguments[0]), int(arguments[1]) if len(arguments) > 1 else MOVES
    start_s = time.process_time()
    totals = play(seed, moves).totals
    print(f"seed {seed}: {dict(totals)} in {time.process_time() - start_s:.1f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
