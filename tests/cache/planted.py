"""Plants faults in what stores and fetches several components, and shows that the tests see each.

    python -m tests.cache.planted            every fault, as a table
    python -m tests.cache.planted boundary   those whose name contains the word

Run on demand, not by `make test`: some seconds per fault. A fault that survives is a hole in the tests.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.planting import Fault, Planting, failing_test, refuse_stale, survey

TESTS = [
    "tests/storage/test_components.py",
    "tests/transfer/test_boundaries.py",
    "tests/cache/test_component_storage.py",
]
RUNS = "240"
TIMEOUT_S = 600
STORING, READS, FETCH, JOBS = (
    "cache/storing.py",
    "cache/reads.py",
    "cache/prefetch.py",
    "transfer/storage_runner.py",
)
TREE, GUARD, PARTS, MARK = (
    "tree/tree.py",
    "storage/guard.py",
    "storage/components.py",
    "storage/fingerprint.py",
)

FAULTS = [
    Fault("store: a boundary of which the host lacks a part", STORING, "r >= kind.reach for", "r > 0 for"),
    Fault("store: a gap does not end a run", STORING, "extended(runs[i], n, n.resident(HOST, component))",
          "extended(runs[i], n, True)"),
    Fault("store: a boundary again with each use", STORING, "if n.boundary_stored:", "if False:"),
    Fault("store: a boundary again while it is stored", STORING, "elif n not in self._ending and", "elif"),
    Fault("store: a boundary that was not taken counts", STORING,
          "node.boundary_stored = result.num_pages == sum(map(len, pages.values()))",
          "node.boundary_stored = True"),
    Fault("store: a boundary ends in a page less", STORING,
          "first = max(0, node.end - kind.reach)", "first = max(0, node.end - kind.reach + 1)"),
    Fault("store: all of a window again", STORING, "first = max(first, known)", "pass"),
    Fault("store: what another boundary has is left out", STORING, "found.append((n, known))",
          "found.append((n, n.start))"),
    Fault("store: the lock of a boundary stays", STORING,
          "(map(len, pages.values()))\n            self._tree.unlock(lock)", "(map(len, pages.values()))"),
    Fault("store: a reset forgets nothing", STORING, "        self._ending.clear()", "        pass"),
    Fault("store: a boundary of a node that is neither stored nor there", STORING,
          "                del path[i:]\n", ""),
    Fault("query: hits end anywhere", READS,
          "return [Trail(component, kind.reach) for component, kind in self._others]", "return []"),
    Fault("query: reach a page short", JOBS, "end - trail.reach)", "end - trail.reach + 1)"),
    Fault("query: the first trail is enough", JOBS, "if found == len(query.trails) or", "if found or"),
    Fault("query: the page that is missing counts", JOBS, "(end if is_whole else at), first",
          "(end if is_whole else at + 1), first"),
    Fault("query: a gap hides everything before it", JOBS, "(end if is_whole else at), first",
          "(end if is_whole else first), first"),
    Fault("query: the count of one component is told", JOBS, "            if not query.trails:\n",
          "            if True:\n"),
    Fault("query: pages are counted from the first row", JOBS,
          "first = len(query.rows) - query.num_pages\n        keys", "first = 0\n        keys"),
    Fault("query: every component asks the backbone's store", JOBS,
          "self._count(task, query, trail.pair, batch)", "self._count(task, query, BACKBONE_PAIR, batch)"),
    Fault("query: a search without end", JOBS, "iter(range(MAX_LOOKS))", "itertools.count()"),
    Fault("jobs: a component's pages go to another's store", JOBS, "return self.parts[pair]",
          "return self.parts[0]"),
    Fault("jobs: the first pages' names for the last pages", JOBS,
          "read.hashes[len(read.hashes) - len(tail.pages) :]", "read.hashes[: len(tail.pages)]"),
    Fault("jobs: stored under the first pages' names", JOBS, "first = len(keys) - len(tail.pages)",
          "first = 0"),
    Fault("jobs: pages of another pool", JOBS, "self._hosts[tail.pair].page_views",
          "self._hosts[0].page_views"),
    Fault("jobs: storage for fewer components is taken", JOBS, "if len(parts) != len(self._hosts):",
          "if False:"),
    Fault("read: what came in part is taken for whole", READS, "if result.num_pages == num_pages:",
          "if result.num_pages >= count:"),
    Fault("read: what did not come whole is not given back", READS,
          "            self._supply.free_all_host(pages)\n", ""),
    Fault("read: duplicates are not given back", READS,
          "            self._supply.free_host(duplicates, component)", "            pass"),
    Fault("read: duplicates go to the backbone's pool", READS, "free_host(duplicates, component)",
          "free_host(duplicates)"),
    Fault("read: a window less", READS, "min(count, kind.reach) if kind.per_page else 1",
          "min(count, max(1, kind.reach - 1)) if kind.per_page else 1"),
    Fault("read: not again when it was gone", READS, "p.tries < MAX_TRIES and", "False and"),
    Fault("read: again for ever", READS, "p.tries < MAX_TRIES and", "True and"),
    Fault("read: again where it was", READS, "return counts[0] - count + done", "return counts[0]"),
    Fault("read: again from the window's start", READS, "return counts[0] - count + done", "return done"),
    Fault("read: more than the host has room for is asked for", READS,
          "return min(num_pages, self._supply.host_room()) if self._others else num_pages",
          "return num_pages"),
    Fault("read: the request hears of new pages only", READS, "gained = count  #", "pass  #"),
    Fault("read: what was fetched is stored again", READS,
          "= is_all_new or before.boundary_stored", "= False"),
    Fault("read: what was fetched is stored, whatever is below", READS,
          "= is_all_new or before.boundary_stored", "= True"),
    Fault("read: the anchor is locked twice", FETCH,
          "        if p.lock is None:\n            p.lock = self._tree.lock(p.anchor, Tier.HOST)",
          "        p.lock = self._tree.lock(p.anchor, Tier.HOST)"),
    Fault("split: both halves are boundaries", TREE, '"created", "stored", "note"',
          '"created", "stored", "boundary_stored", "note"'),
    Fault("detach: boundaries are still believed in storage", TREE,
          "node.stored = node.boundary_stored = False", "node.stored = False"),
    Fault("parts: a fingerprint without component has another name", MARK,
          "        if not self.component:\n", "        if False:\n"),
    Fault("parts: all components have one name", MARK, "        if not self.component:\n",
          "        if True:\n"),
    Fault("parts: a breaker each", GUARD, "other._breaker, other._meters, other._ends_lanes = self._breaker,",
          "other._meters, other._meters, other._ends_lanes = self._meters,"),
    Fault("parts: the first that closes ends the workers", GUARD, "            if self._ends_lanes:\n",
          "            if True:\n"),
    Fault("parts: clear stops at the first", PARTS, "return all([part.clear() for part in self.parts])",
          "return self.parts[0].clear()"),
    Fault("parts: caps are not split", PARTS, "max(1, whole * self.weight // self.total)", "whole"),
    Fault("parts: a cap may become none", PARTS, "max(1, whole * self.weight // self.total)",
          "whole * self.weight // self.total"),
    Fault("parts: what was opened stays open", PARTS,
          "        for part in reversed(parts):\n            part.close()\n        raise", "        raise"),
]  # fmt: skip


def killer(copy: Path) -> str | None:
    """The test that sees what is planted in the copy, None if none does."""
    seen = failing_test(copy, TESTS, TIMEOUT_S, HIRADIX_COMPONENT_RUNS=RUNS)
    return seen and f"`{seen.removeprefix('tests/')}`"


def main(words: list[str]) -> int:
    refuse_stale(FAULTS)
    chosen = [f for f in FAULTS if not words or any(word in f.name for word in words)]
    return survey(("fault", "seen by"), [Planting((f.name,), f, killer) for f in chosen])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
