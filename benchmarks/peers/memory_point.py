"""How much memory a cached node of a given size costs, in a process that does nothing else.

    python memory_point.py MODULE ADAPTER PAGE TOKENS COUNT RATIO     prints bytes per node of TOKENS tokens

Caches COUNT prompts of their own, then 3 * COUNT more, and prints what each of the latter added to the
memory in use: the resident set without what is free in the C library's heap. Holes between temporaries are
whoever's comes next; how many there are hangs on the order in which threads end. With a RATIO a host pool
that many times the device pool has a copy of everything. Prompts are fresh int objects that the caller drops.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import sys
from typing import Any

import numpy as np
import workloads
from timed import HostTurns


class _Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def bytes_in_use() -> int:
    """The process's resident set, without what is free in the heap of the C library (2.33 or newer)."""
    gc.collect()
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _Mallinfo
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") - int(library.mallinfo2().fordblks)


def store(peer: Any, rows: np.ndarray, with_host: bool) -> None:
    """Cache each row as a prompt."""
    for row in rows:
        if with_host:
            peer.turn(row.tolist(), HostTurns())
        else:
            peer.store(row.tolist())


def main() -> None:
    """Measure the point that the arguments name."""
    module, adapter = sys.argv[1:3]
    page, size, count, ratio = int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]), float(sys.argv[6])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    peer = getattr(importlib.import_module(module), adapter)()
    num_tokens = 4 * count * size
    if ratio:
        peer.new(page, num_tokens, ratio)
    else:
        peer.new(page, num_tokens)
    peer.touch_pools()
    rows = workloads.leaves(4 * count, size)
    store(peer, rows[:count], bool(ratio))
    before = bytes_in_use()
    store(peer, rows[count:], bool(ratio))
    print((bytes_in_use() - before) / (3 * count), file=answers, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
