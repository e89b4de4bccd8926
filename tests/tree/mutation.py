"""Plants faults in a copy of the tree, one at a time, and shows that the tests see each.

    python -m tests.tree.mutation            every fault; prints the table of docs/tree.md
    python -m tests.tree.mutation lock       those whose name contains the word

Run on demand, not by `make test`: a few seconds per fault. A fault that survives is a hole in the tests.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.planting import Fault, Planting, failing_test, refuse_stale, survey

TESTS = [
    *(
        f"tests/tree/test_{name}.py"
        for name in ("key", "regressions", "dead_leaves", "merge", "orders", "log", "misuse", "fuzz")
    ),
    "tests/cache/test_components.py",
]
RUNS = "400"
TIMEOUT_S = 600

TREE, VIEW, STORE, PINS = "tree/tree.py", "tree/view.py", "tree/store.py", "tree/pins.py"
RUN, ROWS, ORDER, MERGE = "tree/runs.py", "tree/rows.py", "tree/order.py", "tree/merge.py"
KEY, REMOVAL, HEAP, HASH = "tree/key.py", "tree/removal.py", "policy/eviction.py", "tree/hashing.py"
LEAVES, IDS = "policy/leaves.py", "tree/ids_numpy.py"

FAULTS = [
    Fault("log: another tree's bookmark is followed", TREE, "if self._is_ours(marked) else", "if True else"),
    Fault(
        "log: a walk starts behind the end of a shorter key",
        TREE,
        "at.end > len(key) // self.page_size",
        "False",
    ),
    Fault(
        "log: a part that is no head keeps the bookmark",
        KEY,
        "if start == 0:\n            head",
        "if True:\n            head",
    ),
    Fault("match: a window's run is not reset by a gap", VIEW, "if present else 0", "if present else run"),
    Fault(
        "match: reach one page short",
        VIEW,
        "run >= reach for run, reach in zip(device",
        "run + 1 >= reach for run, reach in zip(device",
    ),
    Fault(
        "match: host data taken for device data",
        TREE,
        "while device_node.device.pages is None:",
        "while False:",
    ),
    Fault(
        "walk: a partial page counts as matched",
        RUN,
        "limit = (equal - lookahead) // page_size",
        "limit = -(-(equal - lookahead) // page_size)",
    ),
    Fault("walk: a bigram page matches without its last token", RUN, "(equal - lookahead) //", "equal //"),
    Fault(
        "walk: page extras are not compared",
        RUN,
        "    for page in range(1, limit):",
        "    for page in range(limit, limit):",
    ),
    Fault(
        "key: the namespace does not reach the root",
        KEY,
        "return row if page or self.space is PLAIN else (row, self.space)",
        "return row",
    ),
    Fault("key: extras are no part of the row", KEY, "            row = (row, extra)", "            pass"),
    Fault(
        "key: wide tokens are cut to 32 bits",
        IDS,
        "if np.bitwise_or.reduce(part) >> 31:",
        "if False:",
    ),
    Fault("key: tokens of 32 bits are cut to 31 and a sign", IDS, "reduce(part) >> 31", "reduce(part) >> 32"),
    Fault("key: an array's wide tokens are cut to 32 bits", KEY, "high == bytes(len(high))", "True"),
    Fault("key: of an array's tokens the sign bit is not looked at", KEY, "low[3::NARROW].isascii()", "True"),
    Fault(
        "key: a slice loses the bigram's last token",
        KEY,
        "self.tokens[start : stop + self.space.lookahead]",
        "self.tokens[start:stop]",
    ),
    Fault(
        "split: the upper half is not locked",
        PINS,
        "backbone.lock_ref = int(node.residency(BACKBONE, tier).lock_ref > 0)",
        "backbone.lock_ref = 0",
    ),
    Fault(
        "split: window locks are lost", PINS, "lock_ref = low.lock_ref - held(node, c, tier)", "lock_ref = 0"
    ),
    Fault(
        "split: holds are counted twice",
        PINS,
        "lock_ref = low.lock_ref - held(node, c, tier)",
        "lock_ref = low.lock_ref",
    ),
    Fault(
        "split: pages off by one",
        STORE,
        "low.pages = ids.copied(low.pages, at, len(low.pages))",
        "low.pages = ids.copied(low.pages, at - 1, len(low.pages))",
    ),
    Fault(
        "split: halves share memory",
        STORE,
        "low.pages = ids.copied(low.pages, at, len(low.pages))",
        "low.pages = low.pages[at:]",
    ),
    Fault(
        "split: the halves change places in the ring",
        ORDER,
        "colder = entry if self._upper_is_hotter else entry.colder",
        "colder = entry.colder if self._upper_is_hotter else entry",
    ),
    Fault(
        "split: the lower half keeps the upper's name",
        RUN,
        "upper.row, node.row = node.row, row_at(node, at, page_size)",
        "upper.row = node.row",
    ),
    Fault(
        "split: hashes stay with the lower half",
        RUN,
        "node.digests[: at * 32], node.digests[at * 32 :]",
        "b'', node.digests",
    ),
    Fault(
        "split: the upper half has no uses",
        TREE,
        "upper.hit_count, upper.priority = node.hit_count,",
        "upper.hit_count, upper.priority = 0,",
    ),
    Fault(
        "split: the upper half has no age",
        TREE,
        "upper.created, upper.stored = node.created,",
        "upper.created, upper.stored = 0,",
    ),
    Fault(
        "lock: locked data stays evictable", PINS, "            orders[0].remove(device)", "            pass"
    ),
    Fault(
        "lock: the floor of a window one page short",
        VIEW,
        "return max(0, at.end - kind.reach)",
        "return max(0, at.end - kind.reach + 1)",
    ),
    Fault(
        "lock: a host lock does not hold device-only data",
        PINS,
        "            pin_backbone(node, 1 - tier, left)",
        "            pass",
    ),
    Fault(
        "lock: a window's only copy is not held",
        PINS,
        "            self.hold(node, component, 1 - tier)",
        "            pass",
    ),
    Fault(
        "lock: a hold is not released by the copy",
        STORE,
        "            self.pins.release(node, component, 1 - tier)",
        "            pass",
    ),
    Fault(
        "lock: a hold is not taken over a late copy",
        STORE,
        "        elif held(node, component, tier):\n            self.pins.hold",
        "        elif False:\n            self.pins.hold",
    ),
    Fault(
        "unlock: data does not become evictable",
        PINS,
        "            orders[0].push(device)",
        "            pass",
    ),
    Fault(
        "unlock: the wrong tier's order",
        PINS,
        "            orders[1].push(host)",
        "            orders[0].push(host)",
    ),
    Fault(
        "unlock: path pushed root first",
        PINS,
        "            orders[0].push(device)",
        "            orders[0].push(device[::-1])",
    ),
    Fault(
        "unlock: a receipt may be given back again",
        TREE,
        "        lock.floors = _GIVEN_BACK\n",
        "",
    ),
    Fault(
        "adopt: own pages come back as duplicates",
        TREE,
        "given[given != entry.pages[lo - at.start :][: len(given)]]",
        "given",
    ),
    Fault("adopt: duplicates are swallowed", TREE, "        if not refused:", "        if True:"),
    Fault(
        "adopt: no split where the pages begin inside",
        TREE,
        "self._split(at, start - at.start)  # `at`",
        "start = at.start  # `at`",
    ),
    Fault(
        "adopt: slices off by one",
        TREE,
        "(at.start - start, at.end - start) if per_page",
        "(at.start - start, at.end - start - 1) if per_page",
    ),
    Fault(
        "adopt: keeps the caller's array",
        TREE,
        "    return ids.copied(pages, first, last)",
        "    return pages[first:last]",
    ),
    Fault(
        "adopt: keeps more bytes alive than its own",
        TREE,
        " and (last - first) * NARROW == len(under):",
        " and last - first == len(pages):",
    ),
    Fault(
        "adopt: ancestors stay colder than the new data",
        STORE,
        "        node = parent\n    return found",
        "        break\n    return found",
    ),
    Fault(
        "adopt: a window where the backbone is not",
        TREE,
        "(component == BACKBONE or at.resident(tier))",
        "True",
    ),
    Fault(
        "insert: pages with a gap before them are taken",
        TREE,
        "if not 0 <= first <= node.end:",
        "if not 0 <= first:",
    ),
    Fault(
        "insert: hits are not counted",
        TREE,
        "            node.hit_count += 1\n            if",
        "            if",
    ),
    Fault("insert: all nodes are as old", TREE, "self._created += 1", "self._created += 0"),
    Fault(
        "insert: priority is not raised",
        TREE,
        "                _prioritise(node, raised)",
        "                pass",
    ),
    Fault(
        "evict: a page is freed twice",
        STORE,
        "        out.add(component, tier, pages)",
        "        out.add(component, tier, ids.joined([pages, pages[:1]]))",
    ),
    Fault(
        "evict: pages leave unreported",
        STORE,
        "        out.add(component, tier, pages)",
        "        out.add(component, tier, pages[1:])",
    ),
    Fault(
        "evict: the node's windows stay behind",
        STORE,
        "        for c in range(1, len(self.components)):",
        "        for c in range(1, 1):",
    ),
    Fault(
        "evict: host-only descendants are orphaned",
        STORE,
        "                stack.append(child)",
        "                pass",
    ),
    Fault("evict: one page more than wanted", REMOVAL, "while missing > 0 and", "while missing >= 0 and"),
    Fault(
        "evict: the front of a big node goes, not its end",
        REMOVAL,
        "node.num_pages - taken if keep_front else taken",
        "taken if keep_front else node.num_pages - taken",
    ),
    Fault(
        "evict: totals are not kept",
        STORE,
        "        self.num_resident[component][tier] -= len(pages)",
        "        pass",
    ),
    Fault(
        "evict: parents never become leaves", STORE, "        parent.num_device_children -= 1", "        pass"
    ),
    Fault("evict: a heap takes inner nodes", LEAVES, "count = node.num_device_children", "count = 0"),
    Fault(
        "evict: a heap forgets exposed parents",
        HEAP,
        "        if place is not None and not place.in_heap:",
        "        if False:",
    ),
    Fault(
        "evict: a heap's halves in the wrong order",
        HEAP,
        "depth = -start if self._context.backbone else start",
        "depth = start if self._context.backbone else -start",
    ),
    Fault(
        "evict: lfu looks at recency only",
        HEAP,
        '"lfu": lambda node, use: node.hit_count',
        '"lfu": lambda node, use: 0',
    ),
    Fault(
        "evict: foretelling disturbs the order",
        HEAP,
        "        for place in popped:\n",
        "        for place in popped[1:]:\n",
    ),
    Fault(
        "demote: without a host copy",
        REMOVAL,
        "if evictable and node.host.pages is not None and",
        "if evictable and",
    ),
    Fault("demote: above device children", REMOVAL, " and node.num_device_children == 0:", ":"),
    Fault(
        "drop_device: locked data goes too", REMOVAL, "if any(n.device.lock_ref for n in below):", "if False:"
    ),
    Fault(
        "missing: what the target has is copied again",
        VIEW,
        "and not n.resident(target, c):",
        "or n.resident(target, c):",
    ),
    Fault("missing: deepest first", VIEW, "segments.extend(reversed(found))", "segments.extend(found)"),
    Fault(
        "merge: pages in the wrong order",
        MERGE,
        "bottom, down = group[0], list(reversed(group))",
        "bottom, down = group[0], list(group)[1:] + [group[0]]",
    ),
    Fault("merge: over a branch", MERGE, "if len(parent.children) != 1 or", "if"),
    Fault(
        "merge: over a lock", MERGE, "            if up.lock_ref or low.lock_ref:", "            if False:"
    ),
    Fault(
        "merge: over a difference in residency",
        MERGE,
        "if (up.pages is None) != (low.pages is None):",
        "if False:",
    ),
    Fault(
        "merge: over a state record",
        MERGE,
        "            elif up.pages is not None:",
        "            elif False:",
    ),
    Fault(
        "merge: hashes move over a gap",
        MERGE,
        "            break  # what is known",
        "            pass  # what is known",
    ),
    Fault(
        "merge: bigram overlap stays in",
        MERGE,
        "overlap = bottom.space.lookahead * bottom.width",
        "overlap = 0",
    ),
    Fault(
        "merge: a node comes back with other content",
        MERGE,
        "if heir is None or (heir.end <= at.start < node.end):",
        "if heir is None:",
    ),
    Fault("merge: a node comes back short", MERGE, "split(at, node.end - at.start)", "at"),
    Fault(
        "merge: everything, at every unlock",
        MERGE,
        "small = parent.num_pages <= RATIO * num_pages",
        "small = True",
    ),
    Fault(
        "path: a merged floor is not cut again",
        VIEW,
        "            if at.start < floor:",
        "            if False:",
    ),
    Fault("hash: the chain restarts in mid-path", ROWS, '    return 0, b""', '    return start, b""'),
    Fault(
        "hash: the prior is the page before the one before",
        ROWS,
        "at.digests[end - DIGEST_BYTES : end]",
        "at.digests[max(end - 2 * DIGEST_BYTES, 0) :][:DIGEST_BYTES]",
    ),
    Fault(
        "hash: the namespace's seed is left out",
        ROWS,
        "rows_behind(key, prior or key.space.seed,",
        'rows_behind(key, prior or b"",',
    ),
    Fault("hash: extras are left out", HASH, "        if extra is not None:", "        if False:"),
    Fault(
        "dead leaf: it stays",
        REMOVAL,
        "if store.dead_leaf is not DeadLeaf.KEEP:\n            before",
        "if False:\n            before",
    ),
    Fault(
        "dead leaf: it stays when demoted",
        REMOVAL,
        "if store.dead_leaf is not DeadLeaf.KEEP:\n            _drop_dead",
        "if False:\n            _drop_dead",
    ),
    Fault(
        "dead leaf: its parents stay",
        REMOVAL,
        "        store.unlink(node, out)\n        node = parent",
        "        store.unlink(node, out)\n        return",
    ),
    Fault(
        "dead leaf: a locked one leaves",
        REMOVAL,
        "if any(entry.lock_ref for entry in entries) or not _is_dead(store, node):",
        "if not _is_dead(store, node):",
    ),
    Fault(
        "dead leaf: any window is enough",
        REMOVAL,
        "reach = store.components[c].reach if store.dead_leaf is DeadLeaf.UNUSABLE else 1",
        "reach = 1",
    ),
    Fault(
        "dead leaf: what is on the host does not count",
        REMOVAL,
        "if not at.resident(DEVICE, c) and not at.resident(HOST, c):",
        "if not at.resident(DEVICE, c):",
    ),
    Fault(
        "dead leaf: what left with it is not counted",
        REMOVAL,
        "missing -= before - store.num_resident[component][tier]",
        "missing -= 0",
    ),
]


def killer(copy: Path) -> str | None:
    """The first test that fails on the copy, None if none does."""
    seen = failing_test(copy, TESTS, TIMEOUT_S, HIRADIX_TREE_RUNS=RUNS)
    return seen and seen.rpartition("/")[2]


def main(words: list[str]) -> int:
    refuse_stale(FAULTS)
    chosen = [fault for fault in FAULTS if all(word in fault.name for word in words)]
    return survey(("fault", "seen by"), [Planting((fault.name,), fault, killer) for fault in chosen])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
