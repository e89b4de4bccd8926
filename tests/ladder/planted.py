"""Wrong copies, planted in an engine's process: what the ladder must see.

All engines copy pages between device and host by one class. `plant` has it look into a file, before each copy,
for the name of the fault that it is to make. A fault changes which bytes arrive, and nothing of what is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from hiradix.memory import StateShape
from hiradix.storage import PageFingerprint
from hiradix.transfer.runners import CopyRunner
from hiradix.transfer.worker import Task


@dataclass
class Copying:
    """What a fault sees of a copy between pools.

    pairs: all pairs of pools; pair: the number of this copy's. source, target: page ids. layer: of the pools,
    None for all. beside: copies that are made with this one, by pair. before: by pair, the pages that the
    last write was of.
    """

    pairs: Sequence[Any]
    pair: int
    source: Any
    target: Any
    layer: int | None = None
    beside: Mapping[int, Any] = field(default_factory=dict)
    before: dict[int, Any] = field(default_factory=dict)

    @property
    def pools(self) -> Any:
        return self.pairs[self.pair]

    @property
    def is_state(self) -> bool:
        return (
            isinstance(self.pools.host.shape, StateShape) or self.pools.host.page_size == 1 and self.pair > 0
        )

    @property
    def is_window(self) -> bool:
        return self.pair > 0 and not self.is_state

    def load(self, source: Any) -> None:
        """Host to device, from these host pages in place of its own."""
        pools = self.pools
        pools.transport.copy_pages(pools.host, pools.device, source, self.target, self.layer)

    def write(self, source: Any, target: Any) -> None:
        """Device to host."""
        if len(source):
            self.pools.transport.copy_pages(self.pools.device, self.pools.host, source, target, None)


Fault = Callable[[Copying], bool]
"""Makes a copy otherwise; False: this copy is none of its kind, and is made as it should be."""


def _one_state_behind(copy: Copying) -> bool:
    """A boundary gets the record that was written for the one before."""
    if not copy.is_state:
        return False
    last = copy.before.get(copy.pair)
    copy.before[copy.pair] = copy.source.copy()
    ids = np.concatenate([copy.source[:1] if last is None else last[-1:], copy.source[:-1]])
    copy.write(ids, copy.target)
    return True


def _one_page_of_all(copy: Copying) -> bool:
    """Of the pages of attention the first alone is written."""
    if copy.pair > 0:
        return False
    copy.write(copy.source[:1], copy.target[:1])
    return True


def _another_windows_pages(copy: Copying) -> bool:
    """The pages of a window, one page off."""
    if not copy.is_window or len(copy.source) < 2:
        return False
    copy.load(np.roll(copy.source, 1))
    return True


def _two_groups_exchanged(copy: Copying) -> bool:
    """Of the first two components beside attention each gets the other's bytes."""
    other = {1: 2, 2: 1}.get(copy.pair, 0)
    theirs = copy.beside.get(other)
    if theirs is None or len(theirs.source) != len(copy.target):
        return False
    device = copy.pairs[other].device
    copy.pools.transport.copy_pages(device, copy.pools.host, theirs.source, copy.target, None)
    return True


def _a_stale_state(copy: Copying) -> bool:
    """A record's place keeps what was there before."""
    return copy.is_state


WRITES: dict[str, Fault] = {
    "a state one block off": _one_state_behind,
    "one of N pages stored": _one_page_of_all,
    "two groups exchanged": _two_groups_exchanged,
    "a stale state under a known hash": _a_stale_state,
}
LOADS: dict[str, Fault] = {"a window's page of another boundary": _another_windows_pages}
ANOTHER_LAYOUT = "another layout after a restart"
"""Pages of one order of bytes are taken for those of another: names do not tell them apart."""


def plant(file: Path) -> None:
    """From now on copies of this process go wrong as `file` says, which need not be there yet."""
    before: dict[int, Any] = {}
    load_layer = CopyRunner._load_layer

    def fault(table: dict[str, Fault]) -> Fault | None:
        return table.get(file.read_text()) if file.exists() else None

    def write(self: CopyRunner, task: Task) -> Iterator[None]:
        copies: Any = task.payload
        beside = {copy.pair: copy for copy in copies}
        for copy in copies:
            made = fault(WRITES)
            own = Copying(self._pairs, copy.pair, copy.source, copy.target, beside=beside, before=before)
            if made is None or not made(own):
                own.write(copy.source, copy.target)
            task.num_pages += len(copy.source)
            yield

    def load(self: CopyRunner, copy: Any, layer: int) -> None:
        made, at = fault(LOADS), self._at[copy.pair].get(layer)
        if at is None or made is None:
            return load_layer(self, copy, layer)
        own = Copying(self._pairs, copy.pair, copy.source, copy.target, at)
        return None if made(own) else load_layer(self, copy, layer)

    digest = PageFingerprint.digest

    def layoutless(self: PageFingerprint) -> str:
        is_blind = file.exists() and file.read_text() == ANOTHER_LAYOUT
        return digest(replace(self, layout="") if is_blind else self)

    PageFingerprint.digest = layoutless  # type: ignore[method-assign]
    CopyRunner.write = write  # type: ignore[method-assign]
    CopyRunner._load_layer = load  # type: ignore[method-assign]
