"""Several ranks in one process, one of them running at any time; the seed decides who is next.

Each rank has a thread so that it may stop in the middle of a collective call, but a rank only runs while it
holds the baton, so a run is as deterministic as one thread.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence

import numpy as np

from hiradix.errors import CacheError


class Unequal(AssertionError):
    """One rank makes a collective call that another one does not make."""


class _Over(BaseException):
    """Another rank has failed: unwind."""


class Lockstep:
    """`agree(rank, vector)` is the elementwise minimum over all ranks; on_sync() runs once per such call."""

    def __init__(self, num_ranks: int, seed: int, on_sync: Callable[[], None]):
        self.num_calls = 0
        self._num_ranks = num_ranks
        self._random = random.Random(seed)
        self._on_sync = on_sync
        self._batons = [threading.Lock() for _ in range(num_ranks)]
        self._vectors: dict[int, np.ndarray] = {}
        self._ended: set[int] = set()
        self._result = np.empty(0, np.int64)
        self._failure: BaseException | None = None

    def agree(self, rank: int, vector: np.ndarray) -> np.ndarray:
        """The collective call."""
        self._vectors[rank] = vector
        others = [r for r in range(self._num_ranks) if r not in self._vectors]
        if others:
            if self._ended:
                raise Unequal(f"ranks {sorted(self._ended)} have ended, rank {rank} calls once more")
            self._pass_on(rank, self._random.choice(others))
        else:
            self._result = np.minimum.reduce(list(self._vectors.values()))
            self._vectors.clear()
            self.num_calls += 1
            self._on_sync()
        return self._result.copy()

    def _pass_on(self, rank: int, other: int) -> None:
        self._batons[other].release()
        self._batons[rank].acquire()
        if self._failure is not None:
            raise _Over

    def run(self, bodies: Sequence[Callable[[], None]]) -> None:
        """Run one body per rank to its end; raises what the first one to fail raised."""
        for baton in self._batons:
            baton.acquire()
        threads = [
            threading.Thread(target=self._live, args=(rank, body), daemon=True)
            for rank, body in enumerate(bodies)
        ]
        for thread in threads:
            thread.start()
        self._batons[0].release()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure

    def _live(self, rank: int, body: Callable[[], None]) -> None:
        self._batons[rank].acquire()
        try:
            if self._failure is None:
                body()
                if self._vectors:
                    raise Unequal(f"rank {rank} has ended, ranks {sorted(self._vectors)} call once more")
        except _Over:
            return
        except BaseException as error:
            self._failure = self._failure or error
        self._ended.add(rank)
        others = [r for r in range(self._num_ranks) if r not in self._ended]
        for other in others if self._failure is not None else others[:1]:
            if self._batons[other].locked():
                self._batons[other].release()


def lost(vector: np.ndarray) -> np.ndarray:
    """What a collective call does when a rank is gone."""
    raise CacheError("rank 1 did not answer")
