"""Re-injects known bugs into a copy of the code, one at a time, and shows what catches each.

    python -m tests.simulation.kill_table            all; the rows of docs/lab/faults.md, with seeds and moves
    python -m tests.simulation.kill_table h1 h17     those of these rows

First the simulation tries a few seeds, then the named tests run, then the simulation tries many. Run on
demand: a few seconds each. A bug that survives is a hole in the tests.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.planting import Fault, Planting, failing_test, run_in, survey, warm

FEW_SEEDS, SEEDS = 20, 200
TIMEOUT_S = 900


@dataclass(frozen=True)
class Bug:
    """A row of the known bugs, re-injected by `fault`.

    tests: what else may catch it. simulated: False where the simulation has a double of the code.
    """

    rows: str
    fault: Fault
    tests: tuple[str, ...] = ()
    simulated: bool = True


def bug(
    rows: str,
    name: str,
    function: str,
    code: str,
    becomes: str,
    *tests: str,
    at: int = 0,
    simulated: bool = True,
) -> Bug:
    return Bug(rows, Fault(name, function, code, becomes, at), tests, simulated)


BUGS = [
    bug(
        "1",
        "a page's copy loses part of what the other pool has",
        "_copy_runs",
        "_1.narrow(_2, _3, _4).copy_(_5.narrow(_2, _6, _4))",
        "_1.narrow(_2, _3, _4)[..., :-1].copy_(_5.narrow(_2, _6, _4)[..., :-1])",
        "tests/memory/test_transport.py",
        simulated=False,
    ),
    bug(
        "3",
        "an accessor reads a layer without waiting for its load",
        "DevicePool.get_value_buffer",
        "self._wait(_1)",
        "pass",
        "tests/memory/test_pools.py",
        simulated=False,
    ),
    bug(
        "3",
        "the gate opens one layer early",
        "LayerDoneCounter._wait_one",
        "_1.layers_done > _2",
        "_1.layers_done >= _2",
    ),
    bug(
        "4",
        "a load is not ordered behind forwards in flight",
        "HiCacheController.start_loading",
        "self._streams.mark()",
        "None",
    ),
    bug(
        "4",
        "a write is not ordered behind the forward that computes its pages",
        "HiCacheController.defer_write",
        "self._streams.mark()",
        "None",
    ),
    bug(
        "4",
        "a write that is not deferred is not ordered behind the forward",
        "HiCacheController.write",
        "self._streams.mark()",
        "None",
        "tests/transfer/test_simulation.py",
        "tests/transfer/test_cuda_streams.py",
    ),
    bug(
        "5",
        "host pages are let go before their load back has ended",
        "LoadBack.load",
        "self._tree.lock(_1, HOST)",
        "self._tree.lock(_1, DEVICE)",
    ),
    bug(
        "6",
        "a read that came short is taken for whole",
        "Reads.arrived",
        "_3.num_pages if _1 < _2.end_page else 0",
        "_a1.num_pages if _1 < _2.end_page else 0",
    ),
    bug(
        "7",
        "a failed get is no miss",
        "_all_done",
        "_1 = _2.index(False) if False in _2 else len(_2)",
        "_1 = len(_2)",
    ),
    bug(
        "8",
        "host copies are visible before they are made",
        "WriteThrough._write",
        "self._mark(_1, True)",
        "self._mark(_1, True)\nself._adopt(_1)",
    ),
    bug(
        "9",
        "a finished request frees pages that the tree took",
        "PrefixCache.cache_finished_req",
        "_1.node.end * self.page_size",
        "_a1.cache_protected_len",
    ),
    bug(
        "12 h17",
        "the hash chain restarts in mid-path after an attach",
        "known_prior",
        "return (0, b'')",
        "return (_a2, b'')",
    ),
    bug(
        "14",
        "bytes are not checked after the copy",
        "Staged._is_good",
        "_1 is Verdict.GOOD",
        "True",
        "tests/storage/test_guard.py",
    ),
    bug(
        "15",
        "a page less is freed than was owned",
        "PrefixCache.cache_finished_req",
        "self._pages.free(_1)",
        "self._pages.free(_1[1:])",
    ),
    bug(
        "15",
        "duplicates of an insert are forgotten",
        "PageSupply.give",
        "self.device_pools[BACKBONE].free(_1[BACKBONE])",
        "pass",
    ),
    bug(
        "17",
        "a lock's boundary is walked differently at release",
        "pins_of_split",
        "int(_1.residency(BACKBONE, _2).lock_ref > 0)",
        "0",
    ),
    bug(
        "18",
        "a prefetch goes on though nobody waits for it",
        "Prefetcher._is_wanted",
        "_1.is_wanted or any((_2.primary is _1 for _2 in self._running))",
        "True",
        "tests/cache/test_prefetch_ends.py",
    ),
    bug(
        "18",
        "a cancelled copy keeps its host pages",
        "WriteThrough.written",
        "self._supply.free_all_host(_1.owns)",
        "pass",
    ),
    bug(
        "19",
        "who waits no more keeps what was held for it",
        "Prefetcher.stop",
        "self.room.release(_1)",
        "pass",
        "tests/cache/test_waiting.py",
    ),
    bug(
        "20",
        "a load back without a page keeps its locks",
        "LoadBack.load",
        "self._unlock(_1)",
        "pass",
    ),
    bug(
        "20",
        "a copy without a host page keeps its locks",
        "WriteThrough._submit",
        "self._unlock(_1)",
        "pass",
        at=1,
    ),
    bug(
        "21 h9b",
        "what an allocation gives out is a view of the free list",
        "take",
        "_1[_2 - _3:_2][::-1].copy()",
        "_1[_2 - _3:_2][::-1]",
    ),
    bug(
        "21 h9b",
        "a node keeps the caller's array",
        "_kept",
        "ids.copied(_1, _2, _3)",
        "_1[_2:_3]",
        "tests/tree/test_regressions.py",
        "tests/tree/test_fuzz.py",
    ),
    bug(
        "22",
        "a failed load's slots are freed though another request has them",
        "RadixTree.drop_device",
        "any((_1.device.lock_ref for _1 in _2))",
        "False",
    ),
    bug(
        "22",
        "pages of a failed load are matched",
        "LoadBack.usable",
        "Match(_1, _1)",
        "_a1",
        "tests/cache/test_lost_hits.py",
    ),
    bug(
        "25",
        "a query that failed never ends its prefetch",
        "Prefetcher.found",
        "self._finish(_1)",
        "_a2.error or self._finish(_1)",
    ),
    bug(
        "25",
        "a prefetch without a hit never ends",
        "Prefetcher.found",
        "self._finish(_1)",
        "_1.found_nothing or self._finish(_1)",
    ),
    bug(
        "27",
        "a wait for storage has no deadline",
        "CallThread.finish",
        "_1.ended.wait(max(0.0, _2))",
        "_1.ended.wait()",
        "tests/storage/test_guard.py",
        simulated=False,
    ),
    bug(
        "28",
        "an insert is not counted as a use",
        "RadixTree.insert",
        "_1.hit_count += 1",
        "pass",
        "tests/cache/test_lost_hits.py",
    ),
    bug(
        "28",
        "only the last node of a path is written through",
        "WriteThrough._uncopied",
        "_1 = _2",
        "_1 = None",
        "tests/cache/test_lost_hits.py",
    ),
    bug(
        "29",
        "an eviction prunes the node with its host copy",
        "RadixTree.evict",
        "_1.drop(_2, _3, _4, _5, _6 is not None and _6.parent is _2)\n_6 = _2",
        (
            "_1.drop(_2, _3, _4, _5, _6 is not None and _6.parent is _2)\n_6 = _2\nif _4 == DEVICE and "
            "_2.host.pages is not None and (not _2.children):\n    if _2.parent is not None and (not "
            "_2.host.lock_ref):\n        _1.unlink(_2, _5)"
        ),
        "tests/cache/test_lost_hits.py",
        "tests/tree/test_fuzz.py",
    ),
    bug(
        "30",
        "mirrors of device pages are not reclaimed on the host",
        "PageSupply.host_room",
        "self.host_pools[_1].available + self.tree.evictable_pages(HOST, _1)",
        "self.host_pools[_1].available",
        "tests/cache/test_lost_hits.py",
        "tests/cache",
    ),
    bug(
        "31",
        "a cap below one prompt switches prefetching off",
        "Sharing._give",
        "_1 and (_2 or not _3)",
        "_1",
        "tests/cache/test_waiting.py",
    ),
    bug(
        "32",
        "nothing is stored",
        "WriteThrough.written",
        "self.storage_backup.store(_1.node)",
        "pass",
        "tests/cache/test_lost_hits.py",
    ),
    bug(
        "35",
        "one result is applied per step",
        "HierarchicalCache._apply",
        "self.controller.poll()",
        "self.controller.poll(1)",
        "tests/cache/test_prefetch_ends.py",
    ),
    bug(
        "38",
        "the breaker never opens",
        "Breaker.record",
        "self._failures < self._limits.failures_to_open",
        "True",
        "tests/storage/test_guard.py",
        "tests/storage/test_parts.py",
    ),
    bug(
        "gray",
        "calls of all kinds have one breaker",
        "Breakers.of",
        "self._of[_1]",
        "self._of[Op.GET]",
        "tests/storage/test_guard.py",
    ),
    bug(
        "gray",
        "what a fetch cost that brought nothing is not charged",
        "NoRegret._fetch_lead_s",
        "self._moved[GatedTransfer.FETCH].fixed_s() + self._waste_s",
        "self._moved[GatedTransfer.FETCH].fixed_s()",
        "tests/transfer/test_no_regret.py",
        simulated=False,
    ),
    bug(
        "38",
        "a detach does not wait for the running job",
        "HiCacheController.detach",
        "if not self._job_table.wait_quiet(STORAGE_KINDS, _1):\n    return False",
        "pass",
        "tests/transfer/test_lifecycle.py",
        "tests/transfer/test_simulation.py",
    ),
    bug(
        "h1",
        "a split between insert and copy: only the lower part goes to storage",
        "WriteThrough.written",
        (
            "if _1:\n    self.storage_backup.store(_2.node)\n    if self.policy.writes_on_evict:\n        "
            "self.storage_backup.store_below(_2.node)"
        ),
        (
            "if _1 and self._controller.storage_attached and (_2.node.parent is not None):\n    "
            "self.storage_backup._submit(_2.node, _2.node.start)\n    if self.policy.writes_on_evict:\n"
            "        self.storage_backup.store_below(_2.node)"
        ),
        "tests/cache/test_lost_hits.py",
    ),
    bug(
        "h2",
        "write-back without room on the host is an error",
        "WriteThrough._submit",
        "self._counters.write_dropped += _1 - (_3 if _2 is None else _4.end)",
        (
            "self._counters.write_dropped += _1 - (_3 if _2 is None else _4.end)\nassert _2 is not "
            "None, 'no room'"
        ),
    ),
    bug(
        "h3",
        "an exception of a backend ends the worker's job without a result",
        "Worker._advance",
        "self._end(_1, _2)",
        "_1.steps = _1.active = None",
    ),
    bug(
        "h4",
        "a reset does not cut off what is under way",
        "HierarchicalCache.reset",
        "self.in_flight.orphan_all()",
        "pass",
    ),
    bug(
        "h4",
        "a reset forgets the prefetcher's counters",
        "HierarchicalCache.reset",
        "(self.write_through, self._load_back, self.prefetcher)",
        "(self.write_through, self._load_back)",
    ),
    bug(
        "h5",
        "a transfer's name is used again while its first bearer is under way",
        "JobTable.new_ticket",
        "next(self._tickets)",
        "next(self._tickets) % 3",
    ),
    bug(
        "h6",
        "storage names ignore the namespace",
        "RadixTree.page_rows",
        "_1 or _2.seed",
        "_1",
    ),
    bug(
        "h6",
        "a prefetch anchored at the root forgets the namespace",
        "PrefixCache._prefetch_key",
        "self._key(_1, _2)",
        "RadixKey(_1)",
    ),
    bug(
        "h16",
        "a detach with nothing attached fails",
        "AttachedStorage.detach",
        "if _1 is not None:\n    _1.close()",
        "_1.close()",
    ),
    bug(
        "wakes",
        "nobody wakes the writer where a step loads",
        "JobTable.submit_load",
        "_1 if self._taken() and _1 is not _2 else None",
        "None",
        "tests/transfer/test_deferred_writes.py",
    ),
    bug(
        "wakes",
        "nobody wakes the writer where a step does not load",
        "HiCacheController.start_loading",
        "self._job_table.release()",
        "pass",
        "tests/transfer/test_deferred_writes.py",
    ),
    bug(
        "wakes",
        "polls wake nobody",
        "JobTable.poll",
        "if self._num_polls > 1:\n    self.release()",
        "pass",
        "tests/transfer/test_deferred_writes.py",
    ),
    bug(
        "wakes",
        "a wait for what nobody has started",
        "JobTable.wait",
        "self.release()",
        "pass",
        "tests/transfer/test_deferred_writes.py",
    ),
    bug(
        "wakes",
        "the loading thread forgets whom it is to wake",
        "_WorkerThread._wake_followers",
        "while self._followers:\n    self._followers.popleft().wake()",
        "self._followers.clear()",
        "tests/transfer/test_deferred_writes.py",
    ),
    bug(
        "wakes",
        "a write that nobody starts has no thread",
        "ThreadDriver.announce",
        "if _1 is None or _1.worker() is not _2:\n    self.wake(_2)",
        "pass",
        "tests/transfer/test_deferred_writes.py",
    ),
    bug(
        "wakes",
        "what the last step writes lies until the next request",
        "Engine.step",
        "not self.has_work",
        "False",
        "tests/engine/test_wakes.py",
    ),
    bug(
        "003-a",
        "one buffer for all pages of a batch",
        "StorageRunner._views",
        "[_1(_2) for _2 in _3.pages[_4:_4 + self._batch_pages].tolist()]",
        "[_1(int(_3.pages[-1])) for _2 in _3.pages[_4:_4 + self._batch_pages].tolist()]",
    ),
    bug(
        "003-b",
        "the tail of a read is given back twice",
        "Reads.arrived",
        "self._supply.free_host(_1[_2:])",
        "self._supply.free_host(_1[_2:])\nself._supply.free_host(_1[_2:])",
    ),
]


def killer(bug: Bug, copy: Path) -> str | None:
    """What sees the bug planted in the copy: a seed of the simulation or a test; None if nothing does."""
    is_simulated = bug.simulated
    if is_simulated and (seen := failing_seed(copy, FEW_SEEDS)):
        return seen
    if bug.tests and (seen := failing_test(copy, bug.tests, TIMEOUT_S)):
        return f"`{seen}`"
    return failing_seed(copy, SEEDS) if is_simulated else None


def failing_seed(copy: Path, num_seeds: int) -> str | None:
    done = run_in(copy, "tests.simulation.run", "hunt", str(num_seeds), timeout_s=TIMEOUT_S)
    if not done.returncode:
        return None
    found = re.search(r"(.*) of \[python -m tests\.simulation\.run (\d+) \d+\]: (.*)", done.stdout)
    assert found is not None, done.stdout + done.stderr
    return f"seed {found.group(2)}, {found.group(1)}: {found.group(3)[:90]}"


def plantings() -> list[Planting]:
    return [Planting((b.rows, b.fault.name), b.fault, partial(killer, b)) for b in BUGS]


def main(rows: list[str]) -> int:
    warm()
    chosen = [p for p in plantings() if not rows or set(rows) & set(p.shown[0].split())]
    return survey(("row", "bug", "caught by"), chosen)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
