"""Collective calls between the ranks' processes: the only file that imports torch.distributed.

Gloo over TCP. A rank that died is noticed at once by its closed connections, one that hangs after the group's
deadline; either way every other rank gets `RankLost`, and so does every later call.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from hiradix.config import RANK_TIMEOUT_S
from hiradix.errors import CacheError, ConfigError

_HEAD_BYTES = 1024
Vector = npt.NDArray[np.int64]


class RankLost(CacheError):
    """A rank died or did not answer within the deadline: the group is of no more use."""


@dataclass(frozen=True)
class Membership:
    """This process's rank, and the address at which the ranks meet.

    address: "host:port" (rank 0 listens there) or "file:///path" of a file that does not exist yet.
    timeout_s: longest wait for another rank, at the start and in every call.
    """

    rank: int
    size: int
    address: str
    timeout_s: float = RANK_TIMEOUT_S

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ConfigError(f"rank {self.rank} of {self.size} ranks")
        if not self.timeout_s > 0:
            raise ConfigError(f"rank timeout of {self.timeout_s} s")


class ProcessGroup:
    """The ranks of one group, of which this process is one. All calls of one thread, in the same order."""

    def __init__(self, membership: Membership):
        self.rank, self.size = membership.rank, membership.size
        self.timeout_s = membership.timeout_s
        self._lost: RankLost | None = None
        address = membership.address
        self._guarded(lambda: self._meet(address if "://" in address else f"tcp://{address}"), "the start")

    def _meet(self, address: str) -> None:
        """Find the others at `address`; with a file, they are on this machine and so are the connections."""
        deadline = timedelta(seconds=self.timeout_s)
        is_local = address.startswith("file://")
        store, _, _ = next(rendezvous(address, self.rank, self.size, timeout=deadline))
        store.set_timeout(deadline)
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        create: Any = dist.ProcessGroupGloo.create_device
        default: Any = dist.ProcessGroupGloo.create_default_device
        options._devices = [create(hostname="127.0.0.1") if is_local else default()]
        options._timeout = deadline
        self._group: Any = dist.ProcessGroupGloo(store, self.rank, self.size, options)

    def least(self, vector: Vector) -> Vector:
        """The elementwise minimum of int64 `vector` over all ranks: what a cache's `agree` is."""
        shared = torch.from_numpy(vector.copy())
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        self._guarded(lambda: self._group.allreduce([shared], options).wait(), "an agreement")
        least: Vector = shared.numpy()
        return least

    def decide(self, vector: Vector) -> Vector:
        """The same minimum, for pipeline parallel stages: rank 0 gets it first and hands it to the others."""
        shared = torch.from_numpy(vector.copy())
        options: Any = dist.ReduceOptions()
        options.reduceOp, options.rootRank, options.rootTensor = dist.ReduceOp.MIN, 0, 0
        self._guarded(lambda: self._group.reduce([shared], options).wait(), "a decision")
        self._broadcast(shared)
        decided: Vector = shared.numpy()
        return decided

    def add(self, partial: torch.Tensor) -> torch.Tensor:
        """`partial` becomes the sum over all ranks, in place, the same bits on each of them."""
        self._guarded(lambda: self._group.allreduce([partial]).wait(), "a sum")
        return partial

    def share(self, value: Any) -> Any:
        """Rank 0's value, which is made of what JSON has; the other ranks' arguments are ignored.

        One call for up to a kilobyte of text, two for more.
        """
        text = json.dumps(value).encode() if self.rank == 0 else b""
        head = np.zeros(_HEAD_BYTES, np.uint8)
        head[:8] = np.frombuffer(len(text).to_bytes(8, "little"), np.uint8)
        first = text[: _HEAD_BYTES - 8]
        head[8 : 8 + len(first)] = np.frombuffer(first, np.uint8)
        self._broadcast(torch.from_numpy(head))
        num_bytes = int.from_bytes(head[:8].tobytes(), "little")
        rest = np.zeros(max(0, num_bytes - _HEAD_BYTES + 8), np.uint8)
        if len(rest):
            if self.rank == 0:
                rest[:] = np.frombuffer(text[len(first) :], np.uint8)
            self._broadcast(torch.from_numpy(rest))
        return value if self.rank == 0 else json.loads((head[8:].tobytes() + rest.tobytes())[:num_bytes])

    def _broadcast(self, tensor: torch.Tensor) -> None:
        options: Any = dist.BroadcastOptions()
        options.rootRank = 0
        self._guarded(lambda: self._group.broadcast([tensor], options).wait(), "a broadcast")

    def _guarded(self, call: Callable[[], object], what: str) -> None:
        """Make a collective call; whatever it raises means that a rank is lost."""
        if self._lost is not None:
            raise self._lost
        try:
            call()
        except (RuntimeError, ValueError, OSError) as error:
            first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
            self._lost = RankLost(
                f"rank {self.rank} of {self.size}: {what} with the other ranks failed "
                f"(a rank died, or did not answer within {self.timeout_s:g} s): {first_line:.200}"
            )
            raise self._lost from error

    def close(self) -> None:
        """Leave the group; the other ranks' next call raises RankLost. Never blocks."""
        self._lost = self._lost or RankLost(f"rank {self.rank} has left the group")
        self._group = None


def place_in(group: Any) -> tuple[int, int]:
    """This process's rank in an engine's own process group, and the group's size; (0, 1) without one."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def least_over(group: Any) -> Callable[[Vector], Vector]:
    """The elementwise minimum of int64 vectors over an engine's own process group, on CPU.

    Raises RankLost when the group does; from then on it is of no more use.
    """

    def least(vector: Vector) -> Vector:
        shared = torch.from_numpy(vector.copy())
        try:
            dist.all_reduce(shared, op=dist.ReduceOp.MIN, group=group)
        except RuntimeError as error:
            raise RankLost(f"an agreement with the other ranks failed: {str(error):.200}") from error
        agreed: Vector = shared.numpy()
        return agreed

    return least
