"""The outer half of a peer's process: streams in, observations out.

python -m tests.differential.peer_0_5_9 STREAMS.json OBSERVATIONS.json
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.differential.moves import Player
from tests.differential.sides import Side


def copy(
    src_layers: list[Any], dst_layers: list[Any], src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    """sgl_kernel's transfer_kv_direct, by torch."""
    for source, target in zip(src_layers, dst_layers):
        target[dst_indices] = source[src_indices].reshape((-1, *target.shape[1:]))


def count_instead_of_time(*modules: Any) -> None:
    """Have every look of `modules` at the clock be later than the one before."""
    ticks = itertools.count(1)
    clock = types.SimpleNamespace(monotonic=lambda: next(ticks), perf_counter=lambda: 0.0)
    for module in modules:
        module.time = clock


def run(side: Side, stream: dict[str, Any]) -> list[dict[str, Any]]:
    """What is seen after each move; the last entry is {"error": ...} if the class raised."""
    player, seen = Player(side, stream["setup"]["page_size"]), []
    for move in stream["moves"]:
        try:
            seen.append(player.play(move))
        except Exception as error:  # the peer's own failure is an observation
            seen.append({"error": f"{type(error).__name__}: {error}"})
            break
    return seen


def main(make: Callable[[dict[str, Any]], Side]) -> None:
    """make: a side from a stream's setup."""
    torch.set_num_threads(1)
    streams = json.loads(Path(sys.argv[1]).read_text())
    seen = [run(make(stream["setup"]), stream) for stream in streams]
    Path(sys.argv[2]).write_text(json.dumps(seen))
    sys.stdout.flush()
    os._exit(0)  # its atexit hooks and threads are nobody's business here
