"""Plants faults in what stores and fetches several components, and shows that the tests see each.

    python -m tests.cache.planted            every fault, as a table
    python -m tests.cache.planted boundary   those whose name contains the word

Run on demand, not by `make test`: some seconds per fault. A fault that survives is a hole in the tests.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.planting import Fault, Planting, failing_test, survey, warm

TESTS = [
    "tests/storage/test_components.py",
    "tests/transfer/test_boundaries.py",
    "tests/cache/test_component_storage.py",
]
RUNS = "240"
TIMEOUT_S = 600

FAULTS = [
    Fault(
        "store: a boundary of which the host lacks a part",
        "StorageBackup._lacking_boundaries",
        "_1 >= _2.reach",
        "_1 > 0",
    ),
    Fault(
        "store: a gap does not end a run",
        "StorageBackup._lacking_boundaries",
        "_1.resident(HOST, _2)",
        "True",
    ),
    Fault(
        "store: a boundary again with each use",
        "StorageBackup._lacking_boundaries",
        "_1.boundary_stored",
        "False",
    ),
    Fault(
        "store: a boundary again while it is stored",
        "StorageBackup._lacking_boundaries",
        "_1 not in self._ending and all((_2 >= _3.reach for _2, (_4, _3) in zip(_5, self._others)))",
        "all((_2 >= _3.reach for _2, (_4, _3) in zip(_5, self._others)))",
    ),
    Fault(
        "store: a boundary that was not taken counts",
        "StorageBackup.stored_boundary",
        "_1.num_pages == _2.num_pages",
        "True",
    ),
    Fault(
        "store: a boundary ends in a page less",
        "StorageBackup._submit_boundary",
        "_1.end - _2.reach",
        "_1.end - _2.reach + 1",
    ),
    Fault(
        "store: all of a window again",
        "StorageBackup._submit_boundary",
        "_1 = max(_1, _2)",
        "pass",
    ),
    Fault(
        "store: what another boundary has is left out",
        "StorageBackup._lacking_boundaries",
        "_1.append((_2, _3))",
        "_1.append((_2, _2.start))",
    ),
    Fault(
        "store: the lock of a boundary stays",
        "StorageBackup.stored_boundary",
        "self._tree.unlock(_1.lock)",
        "pass",
    ),
    Fault(
        "store: a reset forgets nothing",
        "StorageBackup.clear",
        "self._ending.clear()",
        "pass",
    ),
    Fault(
        "store: a boundary of a node that is neither stored nor there",
        "StorageBackup.store",
        "_1.clear()",
        "pass",
    ),
    Fault(
        "query: hits end anywhere",
        "BoundaryReads.__init__",
        "[TrailingWindow(_1, _2.reach) for _1, _2 in _3.others]",
        "[]",
    ),
    Fault(
        "query: the backbone is asked for though it is there",
        "StorageRunner.query",
        "_1.known",
        "0",
    ),
    Fault(
        "query: reach a page short",
        "StorageRunner._window_end",
        "_1 - _2.reach",
        "_1 - _2.reach + 1",
    ),
    Fault(
        "query: the first window is enough",
        "StorageRunner._boundary",
        "_1 == len(_2.windows)",
        "_1",
    ),
    Fault(
        "query: the page that is missing counts",
        "StorageRunner._window_end",
        "_2 if _1 else _3",
        "_2 if _1 else _3 + 1",
    ),
    Fault(
        "query: a gap hides everything before it",
        "StorageRunner._window_end",
        "(_2 if _1 else _3, _4)",
        "(_2 if _1 else _4, _4)",
    ),
    Fault(
        "query: the count of one component is told",
        "StorageRunner.query",
        "not _1.windows",
        "True",
    ),
    Fault(
        "query: pages are counted from the first row",
        "_use_of_query",
        "len(_1.rows) - _1.num_pages",
        "0",
    ),
    Fault(
        "query: every component asks the backbone's store",
        "StorageRunner._window_end",
        "_use_of_query(_1, _2, _3.pair)",
        "_use_of_query(_1, _2, BACKBONE_PAIR)",
    ),
    Fault(
        "query: a search without end",
        "StorageRunner._boundary",
        "iter(range(MAX_LOOKS))",
        "itertools.count()",
    ),
    Fault(
        "jobs: a component's pages go to another's store",
        "StorageRunner._part",
        "self.parts[_1]",
        "self.parts[0]",
    ),
    Fault(
        "jobs: the first pages' names for the last pages",
        "_use_of_read",
        "_1.hashes[_2:]",
        "_1.hashes[: len(_1.hashes) - _2]",
    ),
    Fault(
        "jobs: stored under the first pages' names",
        "StorageRunner.store",
        "len(_1.rows) - len(_2.pages)",
        "0",
    ),
    Fault(
        "jobs: pages of another pool",
        "StorageRunner._views",
        "self._hosts[_1.pair]",
        "self._hosts[0]",
    ),
    Fault(
        "jobs: storage for fewer components is taken",
        "StorageRunner.use",
        "len(_1.parts) != len(self._hosts)",
        "False",
    ),
    Fault(
        "read: what came in part is taken for whole",
        "BoundaryReads.arrived",
        "_1.num_pages == _2.num_pages",
        "_1.num_pages > 0",
    ),
    Fault(
        "read: what did not come whole is not given back",
        "BoundaryReads.arrived",
        "self._supply.free_all_host(_1.owns)",
        "pass",
    ),
    Fault(
        "read: duplicates are not given back",
        "Arrivals.adopt",
        "self.supply.free_host(_1, _2)",
        "pass",
    ),
    Fault(
        "read: duplicates go to the backbone's pool",
        "Arrivals.adopt",
        "self.supply.free_host(_1, _2)",
        "self.supply.free_host(_1)",
    ),
    Fault(
        "read: a window less",
        "lacking",
        "_1.reach if _1.per_page else 1",
        "max(1, _1.reach - 1) if _1.per_page else 1",
    ),
    Fault(
        "read: not again when it was gone",
        "BoundaryReads._end",
        "_1.tries < MAX_TRIES",
        "False",
    ),
    Fault(
        "read: again for ever",
        "BoundaryReads._end",
        "_1.tries < MAX_TRIES",
        "True",
    ),
    Fault(
        "read: again where it was",
        "BoundaryRead.gap",
        "self.found.end - len(_1) + _2",
        "self.found.end",
    ),
    Fault(
        "read: again from the window's start",
        "BoundaryRead.gap",
        "self.found.end - len(_1)",
        "self.found.start",
    ),
    Fault(
        "read: more than the host has room for is asked for",
        "BoundaryReads.most",
        "min(_1, _2.end + _3)",
        "_1",
    ),
    Fault(
        "read: what is there counts as no room",
        "BoundaryReads.most",
        "min(_1, _2.end + _3) - _4.end",
        "min(_1 - _4.end, _3)",
    ),
    Fault(
        "read: what is there could leave for it",
        "BoundaryReads.most",
        "_1 = self._tree.lock(_2, HOST)\n_3 = self._supply.host_room()\nself._tree.unlock(_1)",
        "_3 = self._supply.host_room()",
    ),
    Fault(
        "read: the request hears of what others brought",
        "Arrivals.adopt",
        "_1.end - max(_2, _3)",
        "_1.end - min(_2, _3)",
    ),
    Fault(
        "read: the request hears of new pages only",
        "Arrivals.adopt",
        "_1.end - max(_2, _3)",
        "0",
    ),
    Fault(
        "read: what was fetched is stored again",
        "Arrivals.adopt",
        "_1 or _2.boundary_stored",
        "False",
    ),
    Fault(
        "read: what was fetched is stored, whatever is below",
        "Arrivals.adopt",
        "_1 or _2.boundary_stored",
        "True",
    ),
    Fault(
        "beside: what was not asked for counts as stored",
        "Arrivals._mark_stored",
        "_1.start + _1.known",
        "_1.start",
    ),
    Fault(
        "beside: the backbone is read again",
        "lacking",
        "_2 if _1 is None else _1.end",
        "_2",
    ),
    Fault(
        "beside: a window beside pages that the host lacks",
        "lacking",
        "_1.end > min(_2[1:]) and (not _1.resident(HOST))",
        "False",
    ),
    Fault(
        "beside: all of a node that the host lacks",
        "lacking",
        "max(_1.start, min(_2[1:]))",
        "_1.start",
    ),
    Fault(
        "beside: of a window all is read",
        "_first_gap",
        "_1 = _2.end",
        "pass",
    ),
    Fault(
        "beside: a window goes on behind its gap",
        "_first_gap",
        "_1.start <= _2 < _1.end",
        "_2 < _1.end",
    ),
    Fault(
        "beside: what the device has does not count",
        "_first_gap",
        "any((_1.resident(_2, _3) for _2 in Tier))",
        "_1.resident(HOST, _3)",
    ),
    Fault(
        "beside: what was not asked for is taken to be there still",
        "BoundaryReads.knows",
        "not _2.known",
        "True",
    ),
    Fault(
        "beside: what a boundary has is not kept while the rest is read",
        "BoundaryReads._steps",
        "self._keep(_1, _2)",
        "pass",
    ),
    Fault(
        "beside: what was kept stays kept",
        "BoundaryReads._keep",
        "if _1 is not None:\n    self._tree.unlock(_1)",
        "pass",
    ),
    Fault(
        "beside: the end gives one lock back",
        "ReservedRoom.release",
        "(_1.lock, _1.beside)",
        "(_1.lock,)",
    ),
    Fault(
        "beside: the gate learns from windows what prompts cost",
        "BoundaryReads.arrived",
        "len(_1.owns[BACKBONE]) == _2",
        "True",
    ),
    Fault(
        "beside: the last names for fewer pages",
        "BoundaryReads._submit_read",
        "_1.part(_1.end - max(map(len, _2.values())), _1.end)",
        "_1.part(_1.start, _1.start + max(map(len, _2.values())))",
    ),
    Fault(
        "way: none",
        "BoundaryReads._limits",
        "_1.tries or _1.limit_s == math.inf or 0 < 2 * _2 < _1.limit_s",
        "True or _1.limit_s == math.inf or 0 < 2 * _2 < _1.limit_s",
    ),
    Fault(
        "way: also for who waits for all",
        "BoundaryReads._limits",
        "_1.limit_s == math.inf",
        "False",
    ),
    Fault(
        "way: also where the time suffices",
        "BoundaryReads._limits",
        "0 < 2 * _1 < _2.limit_s",
        "False",
    ),
    Fault(
        "way: not even where the time does not suffice",
        "BoundaryReads._limits",
        "0 < 2 * _1 < _2.limit_s",
        "0 < _1",
    ),
    Fault(
        "way: through what is there",
        "BoundaryReads._limits",
        "_1.start + _1.known",
        "_1.start",
    ),
    Fault(
        "way: as many as there are",
        "BoundaryReads._limits",
        "max(self.step_pages, -(-(_1.end - _2) // MAX_STEPS))",
        "self.step_pages",
    ),
    Fault(
        "way: one right before the end",
        "BoundaryReads._limits",
        "_1.end - _2 // 2",
        "_1.end",
    ),
    Fault(
        "way: again after one did not come",
        "BoundaryReads._limits",
        "_1.tries or _1.limit_s == math.inf or 0 < 2 * _2 < _1.limit_s",
        "_1.limit_s == math.inf or 0 < 2 * _2 < _1.limit_s",
    ),
    Fault(
        "way: one's window is not asked for whole",
        "BoundaryReads._ask_on_the_way",
        "max(_1.start, _2 - max((_3.reach for _3 in self._windows)))",
        "_2",
    ),
    Fault(
        "way: the same boundary twice",
        "BoundaryReads.found_on_the_way",
        "(_1 := (_2.low + _3.num_pages)) > _2.before",
        "(_1 := (_2.low + _3.num_pages)) >= _2.before",
    ),
    Fault(
        "way: the names behind another page",
        "BoundaryReads._rows",
        "_1 - 1 - _2.start",
        "_1 - _2.start",
    ),
    Fault(
        "way: read before all is known",
        "BoundaryReads.found_on_the_way",
        "not _1.tickets",
        "True",
    ),
    Fault(
        "way: read for nobody",
        "BoundaryReads._go_on",
        (
            "if _1.stopped:\n    self._supply.counters.miss('dropped', len(_2.hashes))\nelif "
            "self._submit_steps(_1, _2, _3):\n    return"
        ),
        (
            "if False:\n    self._supply.counters.miss('dropped', len(_2.hashes))\nelif "
            "self._submit_steps(_1, _2, _3):\n    return"
        ),
    ),
    Fault(
        "way: without room for all nothing",
        "BoundaryReads._submit_steps",
        "_1 is None and _2",
        "False",
    ),
    Fault(
        "way: behind a gap all the same",
        "BoundaryReads._note_failed",
        "_1.end_page = _2.start",
        "pass",
    ),
    Fault(
        "way: reads behind a gap go on",
        "BoundaryReads._note_failed",
        "self._executor.cancel(_1)",
        "pass",
    ),
    Fault(
        "way: a gap on the way is one of the whole",
        "BoundaryReads._note_failed",
        "_1.goal if _2 else _3",
        "_3",
    ),
    Fault(
        "way: a gap of the backbone is no gap",
        "BoundaryReads._note_failed",
        "_1 != BACKBONE and _2.end < _3.goal",
        "_2.end < _3.goal",
    ),
    Fault(
        "way: a gap of the last window is no gap",
        "BoundaryReads._note_failed",
        "_1 != BACKBONE and _2.end < _3.goal",
        "_1 != BACKBONE",
    ),
    Fault(
        "way: what is lost behind a failure is not counted",
        "BoundaryReads._note_failed",
        "_1.goal - _2.start",
        "len(_2.hashes)",
    ),
    Fault(
        "way: windows cost an eighth",
        "pages_of_a_step",
        "-WINDOWS_SHARE * _1",
        "-_1",
    ),
    Fault(
        "way: pages of all components are as long",
        "pages_of_a_step",
        "_1 * (_2.reach if _2.per_page else 1)",
        "1 * (_2.reach if _2.per_page else 1)",
    ),
    Fault(
        "read: the lock of before is kept where an earlier boundary is looked for",
        "Prefetcher._ask_again",
        "self.room.release(_1)",
        "pass",
    ),
    Fault(
        "split: both halves are boundaries",
        "RadixTree._split",
        "_1.created, _1.stored = (_2.created, _2.stored)",
        "_1.created, _1.stored = (_2.created, _2.stored)\n_1.boundary_stored = _2.boundary_stored",
    ),
    Fault(
        "detach: boundaries are still believed in storage",
        "RadixTree.forget_stored",
        "_1.stored = _1.boundary_stored = False",
        "_1.stored = False",
    ),
    Fault(
        "clear: pages of a read that it overtook are taken for stored",
        "Arrivals.adopt",
        "if _1.storage_epoch == _2.storage_epoch:\n    self._mark_stored(_3.lock.node, _4)",
        "self._mark_stored(_3.lock.node, _4)",
    ),
    Fault(
        "clear: a boundary that was put before it is taken for stored",
        "StorageBackup.stored_boundary",
        "_1.storage_epoch == self._tree.storage_epoch",
        "True",
    ),
    Fault(
        "parts: a fingerprint without component has another name",
        "PageFingerprint.digest",
        "not self.component",
        "False",
    ),
    Fault(
        "parts: all components have one name",
        "PageFingerprint.digest",
        "not self.component",
        "True",
    ),
    Fault(
        "parts: a breaker each",
        "GuardedStorage.beside",
        "_1.breakers, _1._meters, _1._ends_threads = (self.breakers, self._meters, False)",
        "_1._meters, _1._meters, _1._ends_threads = (self._meters, self._meters, False)",
    ),
    Fault(
        "parts: the first that closes ends the workers",
        "GuardedStorage.close",
        "self._ends_threads",
        "True",
    ),
    Fault(
        "parts: clear stops at the first",
        "Stores.clear",
        "all([_1.clear() for _1 in self.guards])",
        "self.guards[0].clear()",
    ),
    Fault(
        "parts: caps are not split",
        "_Share._part",
        "max(1, _1 * self.weight // self.total)",
        "_1",
    ),
    Fault(
        "parts: a cap may become none",
        "_Share._part",
        "max(1, _1 * self.weight // self.total)",
        "_1 * self.weight // self.total",
    ),
    Fault(
        "stat: another component is another model",
        "_same_model",
        "_1 <= {'component', 'shape', 'dtype', 'layout'}",
        "not _1",
    ),
    Fault(
        "stat: another model is another component",
        "_same_model",
        "'component' in _1 and _1 <= {'component', 'shape', 'dtype', 'layout'}",
        "'component' in _1",
    ),
    Fault(
        "stat: of two models alike the first is it",
        "_same_model",
        "_1[_2] = len(_3)",
        "_1[_2] = 0",
    ),
    Fault(
        "parts: what was opened stays open",
        "_open_all",
        "for _1 in reversed(_2):\n    _1.close()",
        "pass",
    ),
]


def killer(copy: Path) -> str | None:
    """The test that sees what is planted in the copy, None if none does."""
    seen = failing_test(copy, TESTS, TIMEOUT_S, HIRADIX_COMPONENT_RUNS=RUNS)
    return seen and f"`{seen.removeprefix('tests/')}`"


def plantings() -> list[Planting]:
    return [Planting((fault.name,), fault, killer) for fault in FAULTS]


def main(words: list[str]) -> int:
    warm()
    chosen = [p for p in plantings() if not words or any(word in p.fault.name for word in words)]
    return survey(("fault", "seen by"), chosen)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
