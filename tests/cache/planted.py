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
STORING, READS, ARRIVE, FETCH, JOBS = (
    "cache/storing.py",
    "cache/boundaries.py",
    "cache/found.py",
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
          "self._trails = [Trail(component, kind.reach) for component, kind in arrivals.others]",
          "self._trails = []"),
    Fault("query: the backbone is asked for though it is there", JOBS, "found = query.known", "found = 0"),
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
    Fault("read: what came in part is taken for whole", READS, "if result.num_pages == num_pages and",
          "if result.num_pages >= count and"),
    Fault("read: what did not come whole is not given back", READS,
          "                self._supply.free_all_host(pages)\n", ""),
    Fault("read: duplicates are not given back", ARRIVE,
          "            self.supply.free_host(duplicates, component)", "            pass"),
    Fault("read: duplicates go to the backbone's pool", ARRIVE, "free_host(duplicates, component)",
          "free_host(duplicates)"),
    Fault("read: a window less", READS, "end - (kind.reach if kind.per_page else 1))\n        first",
          "end - (max(1, kind.reach - 1) if kind.per_page else 1))\n        first"),
    Fault("read: not again when it was gone", READS, "p.tries < MAX_TRIES and", "False and"),
    Fault("read: again for ever", READS, "p.tries < MAX_TRIES and", "True and"),
    Fault("read: again where it was", READS, "return component, self.found.end - count + done",
          "return component, self.found.end"),
    Fault("read: again from the window's start", READS, "return component, self.found.end - count + done",
          "return component, self.found.start + done"),
    Fault("read: more than the host has room for is asked for", READS,
          "return min(num_pages, resident.end + room) - node.end", "return num_pages - node.end"),
    Fault("read: what is there counts as no room", READS,
          "return min(num_pages, resident.end + room) - node.end", "return min(num_pages - node.end, room)"),
    Fault("read: what is there could leave for it", READS, "        lock = self._tree.lock(resident, HOST)\n"
          "        room = self._supply.host_room()\n        self._tree.unlock(lock)\n",
          "        room = self._supply.host_room()\n"),
    Fault("read: the request hears of what others brought", ARRIVE,
          "gained = found.end - max(start, usable)", "gained = count"),
    Fault("read: the request hears of new pages only", ARRIVE,
          "gained = found.end - max(start, usable)", "gained = len(pages[BACKBONE])"),
    Fault("read: what was fetched is stored again", ARRIVE,
          "= is_all_new or before.boundary_stored", "= False"),
    Fault("read: what was fetched is stored, whatever is below", ARRIVE,
          "= is_all_new or before.boundary_stored", "= True"),
    Fault("beside: what was not asked for counts as stored", ARRIVE, "first = found.start + found.known",
          "first = found.start"),
    Fault("beside: the backbone is read again", READS,
          "first = [floor if node is None else node.end]", "first = [floor]"),
    Fault("beside: a window beside pages that the host lacks", READS,
          "if n.end > min(first[1:]) and not n.resident(HOST):", "if False:"),
    Fault("beside: all of a node that the host lacks", READS,
          "first[BACKBONE] = max(n.start, min(first[1:]))", "first[BACKBONE] = n.start"),
    Fault("beside: of a window all is read", READS, "            at = n.end\n    return at",
          "            pass\n    return at"),
    Fault("beside: a window goes on behind its gap", READS, "n.start <= at < n.end and", "at < n.end and"),
    Fault("beside: what the device has does not count", READS,
          "any(n.resident(tier, component) for tier in Tier)", "n.resident(HOST, component)"),
    Fault("beside: what is there is not kept while storage is asked", READS,
          "        self._keep(p, resident)\n", ""),
    Fault("beside: what a boundary has is not kept while the rest is read", READS,
          "                self._keep(p, node)\n", ""),
    Fault("beside: what was kept stays kept", READS,
          "        if before is not None:\n            self._tree.unlock(before)\n", ""),
    Fault("beside: the end gives one lock back", FETCH, "for lock in (p.lock, p.beside):",
          "for lock in (p.lock,):"),
    Fault("beside: the gate learns from windows what prompts cost", READS,
          "if step.counts[BACKBONE] == count:", "if True:"),
    Fault("beside: the last names for fewer pages", READS,
          "found.hashes[count - max(step.counts.values()) :]",
          "found.hashes[: max(step.counts.values())]"),
    Fault("way: none", READS, "if p.tries or p.limit_s", "if True or p.limit_s"),
    Fault("way: also for who waits for all", READS, "p.limit_s == math.inf or", "False or"),
    Fault("way: also where the time suffices", READS, "0 < 2 * predicted_s < p.limit_s", "False"),
    Fault("way: not even where the time does not suffice", READS, "0 < 2 * predicted_s < p.limit_s",
          "0 < predicted_s"),
    Fault("way: through what is there", READS,
          "first = found.start + found.known\n        step", "first = found.start\n        step"),
    Fault("way: as many as there are", READS,
          "step = max(self.step_pages, -(-(found.end - first) // MAX_STEPS))", "step = self.step_pages"),
    Fault("way: one right before the end", READS, "found.end - step // 2, step", "found.end, step"),
    Fault("way: again after one did not come", READS, "if p.tries or p.limit_s", "if p.limit_s"),
    Fault("way: one's window is not asked for whole", READS,
          "low = max(found.start, before - max(trail.reach for trail in self._trails))", "low = before"),
    Fault("way: the same boundary twice", READS, "if (end := low + result.num_pages) > before:",
          "if (end := low + result.num_pages) > found.start:"),
    Fault("way: the names behind another page", READS, "found.hashes[first - 1 - found.start]",
          "found.hashes[first - found.start]"),
    Fault("way: read before all is known", READS,
          "                if not p.tickets:\n                    self._go_on",
          "                if True:\n                    self._go_on"),
    Fault("way: read for nobody", READS,
          '        if p.stopped:\n            self._supply.counters.miss("dropped"',
          '        if False:\n            self._supply.counters.miss("dropped"'),
    Fault("way: without room for all nothing", READS, "if pages is None and ends:", "if False:"),
    Fault("way: behind a gap all the same", READS, "        p.end_page = step.found.start\n", ""),
    Fault("way: reads behind a gap go on", READS, "            self._controller.cancel(ticket)",
          "            pass"),
    Fault("way: a gap on the way is one of the whole", READS,
          "p.again_end = goal if is_on_the_way else page", "p.again_end = page"),
    Fault("way: a gap of the backbone is no gap", READS,
          "is_on_the_way = component != BACKBONE and step", "is_on_the_way = step"),
    Fault("way: a gap of the last window is no gap", READS, "and step.found.end < goal", ""),
    Fault("way: what is lost behind a failure is not counted", READS,
          "p.lost(goal - step.found.start,", "p.lost(len(step.found.hashes),"),
    Fault("way: windows cost an eighth", READS, "-(-WINDOWS_SHARE * beside", "-(-beside"),
    Fault("way: pages of all components are as long", READS,
          "sum(num_bytes * (kind.reach", "sum(1 * (kind.reach"),
    Fault("read: the anchor is locked twice", FETCH,
          "        if p.lock is None:\n            p.lock = self._tree.lock(p.anchor, Tier.HOST)",
          "        p.lock = self._tree.lock(p.anchor, Tier.HOST)"),
    Fault("split: both halves are boundaries", TREE,
          "upper.created, upper.stored = node.created, node.stored",
          "upper.created, upper.stored = node.created, node.stored\n"
          "        upper.boundary_stored = node.boundary_stored"),
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
    Fault("stat: another component is another model", "storage_tools.py",
          'changed <= {"component", "shape", "dtype", "layout"}', "not changed"),
    Fault("stat: another model is another component", "storage_tools.py",
          ' and changed <= {"component", "shape", "dtype", "layout"}', ""),
    Fault("stat: of two models alike the first is it", "storage_tools.py", "found[other] = len(changed)",
          "found[other] = 0"),
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
