"""Re-injects known bugs into a copy of the code, one at a time, and shows what catches each.

    python -m tests.simulation.kill_table            all; prints the table of docs/reliability.md
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

from tests.planting import Fault, Planting, failing_test, refuse_stale, run_in, survey

FEW_SEEDS, SEEDS = 20, 200
TIMEOUT_S = 900

CORE, BACKUP, LOAD, FETCH = "cache/core.py", "cache/backup.py", "cache/load_back.py", "cache/prefetch.py"
READS, STORAGE_JOBS = "cache/reads.py", "transfer/storage_runner.py"
FLIGHTS, SUPPLY, RADIX, HIRADIX = (
    "cache/flights.py",
    "cache/pages.py",
    "prefix_cache/radix.py",
    "prefix_cache/hiradix.py",
)
CONTROLLER, DESK, WORKER, RUNNERS, GATE = (
    "transfer/controller.py",
    "transfer/desk.py",
    "transfer/worker.py",
    "transfer/runners.py",
    "transfer/gate.py",
)
NOT_SIMULATED = ("memory/transport.py", "memory/pools.py", "storage/lanes.py")  # have doubles there


@dataclass(frozen=True)
class Bug:
    """A row of the known bugs, re-injected by `fault`. tests: what else may catch it."""

    rows: str
    fault: Fault
    tests: tuple[str, ...] = ()


def bug(rows: str, name: str, file: str, old: str, new: str, *tests: str) -> Bug:
    return Bug(rows, Fault(name, file, old, new), tests)


BUGS = [
    bug(
        "1", "a page's copy loses part of what the other pool has", "memory/transport.py",
        "target.narrow(dim, into, num_pages).copy_(source.narrow(dim, first, num_pages))",
        "target.narrow(dim, into, num_pages)[..., :-1].copy_("
        "source.narrow(dim, first, num_pages)[..., :-1])",
        "tests/memory/test_transport.py",
    ),
    bug(
        "3", "an accessor reads a layer without waiting for its load", "memory/pools.py",
        "        self._wait(layer_id)\n        layer = layer_id - self.start_layer",
        "        layer = layer_id - self.start_layer",
        "tests/memory/test_pools.py",
    ),
    bug("3", "the gate opens one layer early", GATE,
        "ready = batch.error is not None or batch.layers_done > layer",
        "ready = batch.error is not None or batch.layers_done >= layer"),
    bug("4", "a load is not ordered behind forwards in flight", CONTROLLER,
        "LoadBatch(batch, producer), self.epoch, self._streams.mark()))",
        "LoadBatch(batch, producer), self.epoch, None))"),
    bug("4", "a write is not ordered behind the forward that computes its pages", CONTROLLER,
        "task = self._task(JobKind.WRITE, self._size(copies), copies, self._streams.mark())",
        "task = self._task(JobKind.WRITE, self._size(copies), copies, None)"),
    bug("4", "a write that is not deferred is not ordered behind the forward", CONTROLLER,
        "return self._submit(JobKind.WRITE, self._size(copies), copies, self._streams.mark())",
        "return self._submit(JobKind.WRITE, self._size(copies), copies, None)",
        "tests/transfer/test_simulation.py", "tests/transfer/test_cuda_streams.py"),
    bug("5", "host pages are let go before their load back has ended", LOAD,
        "locks = (self._tree.lock(node, HOST), self._tree.lock(node, DEVICE))",
        "locks = (self._tree.lock(node, DEVICE), self._tree.lock(node, DEVICE))"),
    bug("6", "a read that came short is taken for whole", READS,
        "usable = result.num_pages if start < p.end_page else 0",
        "usable = len(host_pages) if start < p.end_page else 0"),
    bug("7", "a failed get is no miss", STORAGE_JOBS, "        if not ok:\n            return False",
        "        if not ok:\n            pass"),
    bug("8", "host copies are visible before they are made", BACKUP,
        "        ticket = self._controller.defer_write(source, host_pages, down.copies())\n",
        "        ticket = self._controller.defer_write(source, host_pages, down.copies())\n"
        "        self._adopt(down)\n"),
    bug("9", "a finished request frees pages that the tree took", RADIX,
        "                    kept = lock.node.end * self.page_size\n",
        "                    kept = req.cache_protected_len\n"),
    bug("12 h17", "the hash chain restarts in mid-path after an attach", "tree/rows.py",
        '    return 0, b""', '    return start, b""'),
    bug("14", "bytes are not checked after the copy", "storage/staged.py",
        "return verdict is Verdict.GOOD", "return True", "tests/storage/test_guard.py"),
    bug("15", "a page less is freed than was owned", RADIX,
        "            self._pages.free(tail)", "            self._pages.free(tail[1:])"),
    bug("15", "duplicates of an insert are forgotten", SUPPLY,
        "                self.device.free(duplicates[BACKBONE])", "                pass"),
    bug("17", "a lock's boundary is walked differently at release", "tree/pins.py",
        "backbone.lock_ref = int(node.residency(BACKBONE, tier).lock_ref > 0)",
        "backbone.lock_ref = 0"),
    bug("18", "a prefetch goes on though nobody waits for it", FETCH,
        "        return p.is_wanted or any(q.primary is p for q in self._running)", "        return True",
        "tests/cache/test_prefetch_ends.py"),
    bug("18", "a cancelled copy keeps its host pages", BACKUP,
        "                self._supply.free_all_host(down.host)\n            self._unlock(locks)",
        "                pass\n            self._unlock(locks)"),
    bug("19", "a look-up that finds nothing keeps its pin", FETCH,
        "            if lock is not None:\n                self._tree.unlock(lock)",
        "            if lock is not None and p.loaded_pages:\n                self._tree.unlock(lock)"),
    bug("20", "a load back without a page keeps its locks", LOAD,
        "            self._counters.load_refused += asked\n            self._unlock(locks)",
        "            self._counters.load_refused += asked"),
    bug("20", "a copy without a host page keeps its locks", BACKUP,
        "            self._unlock(locks)\n            return None", "            return None"),
    bug("21 h9b", "what an allocation gives out is a view of the free list", "tree/ids_numpy.py",
        "pages = stack[num_free - count : num_free][::-1].copy()",
        "pages = stack[num_free - count : num_free][::-1]"),
    bug("21 h9b", "a node keeps the caller's array", "tree/tree.py",
        "    return ids.copied(pages, first, last)", "    return pages[first:last]",
        "tests/tree/test_regressions.py", "tests/tree/test_fuzz.py"),
    bug("22", "a failed load's slots are freed though another request has them", "tree/removal.py",
        "if any(n.device.lock_ref for n in below):", "if False:"),
    bug("22", "pages of a failed load are matched", LOAD,
        "        return Match(device_node, device_node)", "        return match",
        "tests/cache/test_lost_hits.py"),
    bug("25", "a query that failed never ends its prefetch", FETCH,
        "            self._read(p, Found(start,", "            result.error or self._read(p, Found(start,"),
    bug("25", "a prefetch without a hit never ends", FETCH,
        "            return self._finish(p)\n        p.phase = Phase.READ",
        "            return\n        p.phase = Phase.READ"),
    bug("27", "a wait for storage has no deadline", "storage/lanes.py",
        "call.ended.wait(max(0.0, timeout_s))", "call.ended.wait()", "tests/storage/test_guard.py"),
    bug("28", "an insert is not counted as a use", "tree/tree.py",
        "            node.hit_count += 1\n            if", "            if",
        "tests/cache/test_lost_hits.py"),
    bug("28", "only the last node of a path is written through", BACKUP,
        "            at = parent\n        runs.reverse()", "            at = None\n        runs.reverse()",
        "tests/cache/test_lost_hits.py"),
    bug("29", "an eviction prunes the node with its host copy", "tree/removal.py",
        "        gone = node\n        if store.dead",
        "        gone = node\n"
        "        if tier == DEVICE and node.host.pages is not None and not node.children:\n"
        "            if node.parent is not None and not node.host.lock_ref:\n"
        "                store.unlink(node, out)\n"
        "        if store.dead",
        "tests/cache/test_lost_hits.py", "tests/tree/test_fuzz.py"),
    bug("30", "mirrors of device pages are not reclaimed on the host", SUPPLY,
        "return self.host_pools[component].available + self.tree.evictable_pages(HOST, component)",
        "return self.host_pools[component].available",
        "tests/cache/test_lost_hits.py", "tests/cache"),
    bug("31", "a cap below one prompt switches prefetching off", "policy/prefetch.py",
        "        if num_pages_in_flight == 0:\n            return True\n", "",
        "tests/transfer/test_policies.py"),
    bug("32", "nothing is stored", BACKUP,
        "            if ok:\n                self.storing.store(node)", "            pass",
        "tests/cache/test_lost_hits.py"),
    bug("35", "one result is applied per step", CORE,
        "results = self.controller.poll()", "results = self.controller.poll(1)",
        "tests/cache/test_prefetch_ends.py"),
    bug("38", "the breaker never opens", "storage/breaker.py",
        "self._failures < self._limits.failures_to_open", "True",
        "tests/storage/test_guard.py", "tests/storage/test_parts.py"),
    bug("38", "a detach does not wait for the running job", CONTROLLER,
        "        if not self._desk.wait_quiet(STORAGE_KINDS, timeout_s):\n            return False\n", "",
        "tests/transfer/test_lifecycle.py", "tests/transfer/test_simulation.py"),
    bug("h1", "a split between insert and copy: only the lower part goes to storage", BACKUP,
        "            if ok:\n                self.storing.store(node)",
        "            if ok and self._controller.storage_attached and node.parent is not None:\n"
        "                self.storing._submit(node, node.start)",
        "tests/cache/test_lost_hits.py"),
    bug("h2", "write-back without room on the host is an error", BACKUP,
        "        if down is None:\n            self._unlock(locks)",
        '        assert down is not None, "no room"\n'
        "        if down is None:\n            self._unlock(locks)"),
    bug("h3", "an exception of a backend ends the worker's job without a result", WORKER,
        "        except Exception as error:  # whatever a backend raises is a failed job\n"
        "            self._end(lane, error)",
        "        except Exception:\n            lane.steps = lane.active = None"),
    bug("h4", "a reset does not cut off what is under way", CORE,
        "        self.flights.orphan_all()\n", ""),
    bug("h4", "a reset forgets the prefetcher's counters", CORE,
        "for part in (self.backup, self._load_back, self.prefetcher):",
        "for part in (self.backup, self._load_back):"),
    bug("h5", "a transfer's name is used again while its first bearer is under way", DESK,
        "ticket = Ticket(next(self._tickets))", "ticket = Ticket(next(self._tickets) % 3)"),
    bug("h6", "storage names ignore the namespace", "tree/rows.py",
        "return PageRows(prior or space.seed, rows", "return PageRows(prior, rows"),
    bug("h6", "a prefetch anchored at the root forgets the namespace", HIRADIX,
        "            key = self._key(tokens, req)[:num_tokens]",
        "            key = RadixKey(tokens)[:num_tokens]"),
    bug("h16", "a detach with nothing attached fails", HIRADIX,
        "        if storage is not None:\n            storage.close()", "        storage.close()"),
    bug("wakes", "nobody wakes the writer where a step loads", DESK,
        "writer if self._taken() and writer is not worker else None", "None",
        "tests/transfer/test_deferred_writes.py"),
    bug("wakes", "nobody wakes the writer where a step does not load", CONTROLLER,
        "            self._desk.release()\n            return -1", "            return -1",
        "tests/transfer/test_deferred_writes.py"),
    bug("wakes", "polls wake nobody", DESK,
        "            if self._num_polls > 1:\n                self.release()\n", "",
        "tests/transfer/test_deferred_writes.py"),
    bug("wakes", "a wait for what nobody has started", DESK,
        "        waiting = list(tickets)\n        self.release()\n", "        waiting = list(tickets)\n",
        "tests/transfer/test_deferred_writes.py"),
    bug("wakes", "the loading thread forgets whom it is to wake", "transfer/drivers.py",
        "        while self._followers:\n            self._followers.popleft().wake()",
        "        self._followers.clear()",
        "tests/transfer/test_deferred_writes.py"),
    bug("wakes", "a write that nobody starts has no thread", "transfer/drivers.py",
        "        if self._thread_of(worker) is None:\n            self.wake(worker)",
        "        pass",
        "tests/transfer/test_deferred_writes.py"),
    bug("wakes", "what the last step writes lies until the next request", "engine/engine.py",
        "            if not self.has_work:\n                self.cache.ready_to_load_host_cache()",
        "            if False:\n                self.cache.ready_to_load_host_cache()",
        "tests/engine/test_wakes.py"),
    bug("003-a", "one buffer for all pages of a batch", STORAGE_JOBS,
        "return [page_views(page) for page in", "return [page_views(int(tail.pages[-1])) for page in"),
    bug("003-b", "the tail of a read is given back twice", READS,
        "                self._supply.free_host(host_pages[usable:])\n",
        "                self._supply.free_host(host_pages[usable:])\n"
        "                self._supply.free_host(host_pages[usable:])\n"),
]  # fmt: skip


def killer(bug: Bug, copy: Path) -> str | None:
    """What sees the bug planted in the copy: a seed of the simulation or a test; None if nothing does."""
    is_simulated = bug.fault.file not in NOT_SIMULATED
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


def main(rows: list[str]) -> int:
    refuse_stale(b.fault for b in BUGS)
    chosen = [b for b in BUGS if not rows or set(rows) & set(b.rows.split())]
    plantings = [Planting((b.rows, b.fault.name), b.fault, partial(killer, b)) for b in chosen]
    return survey(("row", "bug", "caught by"), plantings)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
