"""Plants faults in a copy of the tree, one at a time, and shows that the tests see each.

    python -m tests.tree.mutation            every fault; prints the table of docs/lab/tree.md
    python -m tests.tree.mutation lock       those whose name contains the word

Run on demand, not by `make test`: a few seconds per fault. A fault that survives is a hole in the tests.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.planting import Fault, Planting, failing_test, survey, warm

TESTS = [
    *(
        f"tests/tree/test_{name}.py"
        for name in ("key", "regressions", "dead_leaves", "merge", "orders", "log", "misuse", "fuzz")
    ),
    "tests/cache/test_components.py",
]
RUNS = "400"
TIMEOUT_S = 600


FAULTS = [
    Fault(
        "log: another tree's bookmark is followed",
        "RadixTree._resumed",
        "self._is_ours(_1)",
        "True",
    ),
    Fault(
        "log: a walk starts behind the end of a shorter key",
        "RadixTree._resumed",
        "_1.end > len(_2) // self.page_size",
        "False",
    ),
    Fault(
        "log: a part that is no head keeps the bookmark",
        "RadixKey.__getitem__",
        "if _1 == 0:\n    _2.bookmark = self.bookmark",
        "if True:\n    _2.bookmark = self.bookmark",
    ),
    Fault(
        "match: a window's run is not reset by a gap",
        "extended",
        "min(_2 + _3.num_pages, UNBOUNDED) if _1 else 0",
        "min(_2 + _3.num_pages, UNBOUNDED) if _1 else _2",
    ),
    Fault(
        "match: reach one page short",
        "RadixTree.boundaries",
        "(_1 >= _2 for _1, _2 in zip(_3, _4))",
        "(_1 + 1 >= _2 for _1, _2 in zip(_3, _4))",
    ),
    Fault(
        "match: host data taken for device data",
        "RadixTree.boundaries",
        "_1.device.pages is None",
        "False",
    ),
    Fault(
        "walk: a partial page counts as matched",
        "_matched_pages",
        "(_1 - _2) // _3",
        "-(-(_1 - _2) // _3)",
    ),
    Fault(
        "walk: a bigram page matches without its last token",
        "_matched_pages",
        "(_1 - _2) // _3",
        "_1 // _3",
    ),
    Fault(
        "walk: page extras are not compared",
        "_matched_extras",
        "range(1, _1)",
        "range(_1, _1)",
    ),
    Fault(
        "key: the namespace does not reach the root",
        "RadixKey.row",
        "_2 if _1 or self.space is PLAIN else (_2, self.space)",
        "_2",
    ),
    Fault(
        "key: extras are no part of the row",
        "RadixKey.row",
        "_1 = (_1, _2)",
        "pass",
    ),
    Fault(
        "key: wide tokens are cut to 32 bits",
        "narrow",
        "np.bitwise_or.reduce(_1) >> 31",
        "False",
    ),
    Fault(
        "key: tokens of 32 bits are cut to 31 and a sign",
        "narrow",
        "np.bitwise_or.reduce(_1) >> 31",
        "np.bitwise_or.reduce(_1) >> 32",
    ),
    Fault(
        "key: an array's wide tokens are cut to 32 bits",
        "_packed_array",
        "_1 == bytes(len(_1))",
        "True",
    ),
    Fault(
        "key: of an array's tokens the sign bit is not looked at",
        "_packed_array",
        "_1[3::NARROW].isascii()",
        "True",
    ),
    Fault(
        "key: a slice loses the bigram's last token",
        "RadixKey.__getitem__",
        "_1 + self.space.lookahead",
        "_1",
    ),
    Fault(
        "split: the upper half is not locked",
        "pins_of_split",
        "int(_1.residency(BACKBONE, _2).lock_ref > 0)",
        "0",
    ),
    Fault(
        "split: window locks are lost",
        "pins_of_split",
        "_1.lock_ref - held(_2, _3, _4)",
        "0",
    ),
    Fault(
        "split: holds are counted twice",
        "pins_of_split",
        "_1.lock_ref - held(_2, _3, _4)",
        "_1.lock_ref",
    ),
    Fault(
        "split: pages off by one",
        "Residencies.split",
        "ids.copied(_1.pages, _2, len(_1.pages))",
        "ids.copied(_1.pages, _2 - 1, len(_1.pages))",
    ),
    Fault(
        "split: halves share memory",
        "Residencies.split",
        "ids.copied(_1.pages, _2, len(_1.pages))",
        "_1.pages[_2:]",
    ),
    Fault(
        "split: the halves change places in the ring",
        "LruOrder.split",
        "_1 if self._upper_is_hotter else _1.colder",
        "_1.colder if self._upper_is_hotter else _1",
    ),
    Fault(
        "split: the lower half keeps the upper's name",
        "split_run",
        "_1.row, _2.row = (_2.row, row_at(_2, _3, _4))",
        "_1.row = _2.row",
    ),
    Fault(
        "split: hashes stay with the lower half",
        "split_run",
        "(_1.digests[:_2 * 32], _1.digests[_2 * 32:])",
        "(b'', _1.digests)",
    ),
    Fault(
        "split: the upper half has no uses",
        "RadixTree._split",
        "_1.hit_count",
        "0",
    ),
    Fault(
        "split: the upper half has no age",
        "RadixTree._split",
        "(_1.created, _1.stored)",
        "(0, _1.stored)",
    ),
    Fault(
        "lock: locked data stays evictable",
        "Pinning.pin",
        "_1[0].remove(_2)",
        "pass",
    ),
    Fault(
        "lock: the floor of a window one page short",
        "RadixTree.floor",
        "_1.end - _2.reach",
        "_1.end - _2.reach + 1",
    ),
    Fault(
        "lock: a host lock does not hold device-only data",
        "pin_backbone",
        "pin_backbone(_1, 1 - _2, _3)",
        "pass",
    ),
    Fault(
        "lock: a window's only copy is not held",
        "Pinning.pin_other",
        "self.hold(_1, _2, 1 - _3)",
        "pass",
    ),
    Fault(
        "lock: a hold is not released by the copy",
        "Residencies.take",
        "self.pins.release(_1, _2, 1 - _3)",
        "pass",
    ),
    Fault(
        "lock: a hold is not taken over a late copy",
        "Residencies.take",
        "held(_1, _2, _3)",
        "False",
    ),
    Fault(
        "unlock: data does not become evictable",
        "Pinning.unpin",
        "_1[0].push(_2)",
        "pass",
    ),
    Fault(
        "unlock: the wrong tier's order",
        "Pinning.unpin",
        "_1[1].push(_2)",
        "_1[0].push(_2)",
    ),
    Fault(
        "unlock: path pushed root first",
        "Pinning.unpin",
        "_1[0].push(_2)",
        "_1[0].push(_2[::-1])",
    ),
    Fault(
        "unlock: a receipt may be given back again",
        "RadixTree.unlock",
        "_1.floors = _GIVEN_BACK",
        "pass",
    ),
    Fault(
        "adopt: own pages come back as duplicates",
        "RadixTree._adopt",
        "_1[_1 != _2.pages[_3 - _4.start:][:len(_1)]]",
        "_1",
    ),
    Fault(
        "adopt: duplicates are swallowed",
        "RadixTree._adopt",
        "if not _1:\n    return NO_PAGES",
        "if True:\n    return NO_PAGES",
    ),
    Fault(
        "adopt: no split where the pages begin inside",
        "RadixTree._adopt",
        "self._split(_1, _2 - _1.start)",
        "_2 = _1.start",
    ),
    Fault(
        "adopt: slices off by one",
        "RadixTree._adopt",
        "(_1.start - _2, _1.end - _2)",
        "(_1.start - _2, _1.end - _2 - 1)",
    ),
    Fault(
        "adopt: keeps the caller's array",
        "_kept",
        "ids.copied(_1, _2, _3)",
        "_1[_2:_3]",
    ),
    Fault(
        "adopt: keeps more bytes alive than its own",
        "_kept",
        "(_1 - _2) * NARROW == len(_3)",
        "_1 - _2 == len(_a1)",
    ),
    Fault(
        "adopt: ancestors stay colder than the new data",
        "_evictable_path",
        "_1 = _2",
        "break",
    ),
    Fault(
        "adopt: a window where the backbone is not",
        "RadixTree._adopt",
        "_1 == BACKBONE or _2.resident(_3)",
        "True",
    ),
    Fault(
        "insert: pages with a gap before them are taken",
        "RadixTree._refuse_unfit",
        "0 <= _1 <= _2.end",
        "0 <= _1",
    ),
    Fault(
        "insert: hits are not counted",
        "RadixTree.insert",
        "_1.hit_count += 1",
        "pass",
    ),
    Fault(
        "insert: all nodes are as old",
        "RadixTree._grow",
        "self._created += 1",
        "self._created += 0",
    ),
    Fault(
        "insert: priority is not raised",
        "RadixTree.insert",
        "_prioritise(_1, _2)",
        "pass",
    ),
    Fault(
        "evict: a page is freed twice",
        "Residencies._drop_entry",
        "_1.add(_2, _3, _4)",
        "_1.add(_2, _3, ids.joined([_4, _4[:1]]))",
    ),
    Fault(
        "evict: pages leave unreported",
        "Residencies._drop_entry",
        "_1.add(_2, _3, _4)",
        "_1.add(_2, _3, _4[1:])",
    ),
    Fault(
        "evict: the node's windows stay behind",
        "Residencies.drop",
        "len(self.components)",
        "1",
    ),
    Fault(
        "evict: host-only descendants are orphaned",
        "Residencies._empty",
        "_1.append(_2)",
        "pass",
    ),
    Fault(
        "evict: one page more than wanted",
        "RadixTree.evict",
        "_1 > 0 and (_2 := _3.coldest()) is not None",
        "_1 >= 0 and (_2 := _3.coldest()) is not None",
    ),
    Fault(
        "evict: the front of a big node goes, not its end",
        "RadixTree._cut_victim",
        "_2.num_pages - _3 if _1 else _3",
        "_3 if _1 else _2.num_pages - _3",
    ),
    Fault(
        "evict: totals are not kept",
        "Residencies._drop_entry",
        "self.num_resident[_1][_2] -= len(_3)",
        "pass",
    ),
    Fault(
        "evict: parents never become leaves",
        "Residencies._device_child_left",
        "_1.num_device_children -= 1",
        "pass",
    ),
    Fault(
        "evict: a heap takes inner nodes",
        "is_blocked",
        "_1.num_device_children",
        "0",
    ),
    Fault(
        "evict: a heap forgets exposed parents",
        "HeapOrder.expose",
        "_1 is not None and (not _1.in_heap)",
        "False",
    ),
    Fault(
        "evict: a heap's halves in the wrong order",
        "HeapOrder._add",
        "-_1 if self._context.backbone else _1",
        "_1 if self._context.backbone else -_1",
    ),
    Fault(
        "evict: lfu looks at recency only",
        "",
        "node.hit_count",
        "0",
    ),
    Fault(
        "evict: foretelling disturbs the order",
        "HeapOrder.victims",
        "for _1 in _2:\n    heapq.heappush(_3, _1)",
        "for _1 in _2[1:]:\n    heapq.heappush(_3, _1)",
    ),
    Fault(
        "demote: without a host copy",
        "RadixTree.demote",
        "_1 and _2.host.pages is not None and (_2.num_device_children == 0)",
        "_1 and _2.num_device_children == 0",
    ),
    Fault(
        "demote: above device children",
        "RadixTree.demote",
        "_1 and _2.host.pages is not None and (_2.num_device_children == 0)",
        "_1 and _2.host.pages is not None",
    ),
    Fault(
        "drop_device: locked data goes too",
        "RadixTree.drop_device",
        "any((_1.device.lock_ref for _1 in _2))",
        "False",
    ),
    Fault(
        "missing: what the target has is copied again",
        "RadixTree.missing",
        "_1 is not None and (not _2.resident(_3, _4))",
        "_1 is not None or _2.resident(_3, _4)",
    ),
    Fault(
        "missing: deepest first",
        "RadixTree.missing",
        "reversed(_1)",
        "_1",
    ),
    Fault(
        "merge: pages in the wrong order",
        "_merge",
        "list(reversed(_1))",
        "list(_1)[1:] + [_1[0]]",
    ),
    Fault(
        "merge: over a branch",
        "_is_alike",
        "len(_1.children) != 1 or _1.width != _2.width or _1.stored != _2.stored",
        "_1.width != _2.width or _1.stored != _2.stored",
    ),
    Fault(
        "merge: over a lock",
        "_is_alike",
        "_1.lock_ref or _2.lock_ref",
        "False",
    ),
    Fault(
        "merge: over a difference in residency",
        "_is_alike",
        "(_1.pages is None) != (_2.pages is None)",
        "False",
    ),
    Fault(
        "merge: over a state record",
        "_is_alike",
        "_1.pages is not None",
        "False",
    ),
    Fault(
        "merge: hashes move over a gap",
        "_merge_runs",
        "break",
        "pass",
    ),
    Fault(
        "merge: bigram overlap stays in",
        "_merge_runs",
        "_1.space.lookahead * _1.width",
        "0",
    ),
    Fault(
        "merge: a node comes back with other content",
        "revived",
        "_1 is None or _1.end <= _2.start < _3.end",
        "_1 is None",
    ),
    Fault(
        "merge: a node comes back short",
        "revived",
        "_1(_2, _3.end - _2.start)",
        "_2",
    ),
    Fault(
        "merge: everything, at every unlock",
        "merge_path",
        "_1.num_pages <= RATIO * _2",
        "True",
    ),
    Fault(
        "path: a merged floor is not cut again",
        "RadixTree.path",
        "_1.start < _2",
        "False",
    ),
    Fault(
        "hash: the chain restarts in mid-path",
        "known_prior",
        "return (0, b'')",
        "return (_a2, b'')",
    ),
    Fault(
        "hash: the prior is the page before the one before",
        "known_prior",
        "_1.digests[_2 - DIGEST_BYTES:_2]",
        "_1.digests[max(_2 - 2 * DIGEST_BYTES, 0):][:DIGEST_BYTES]",
    ),
    Fault(
        "hash: the namespace's seed is left out",
        "RadixTree.rows",
        "_1.space.seed",
        "b''",
    ),
    Fault(
        "hash: extras are left out",
        "hash_pages",
        "_1 is not None",
        "False",
    ),
    Fault(
        "dead leaf: it stays",
        "RadixTree.evict",
        "_1.dead_leaf is not DeadLeaf.KEEP",
        "False",
    ),
    Fault(
        "dead leaf: it stays when demoted",
        "RadixTree.demote",
        "self._residencies.dead_leaf is not DeadLeaf.KEEP",
        "False",
    ),
    Fault(
        "dead leaf: its parents stay",
        "Residencies.drop_dead",
        "_1 = _2",
        "return",
    ),
    Fault(
        "dead leaf: a locked one leaves",
        "Residencies.drop_dead",
        "any((_1.lock_ref for _1 in _2)) or not self._is_dead(_3)",
        "not self._is_dead(_3)",
    ),
    Fault(
        "dead leaf: any window is enough",
        "Residencies._is_dead",
        "self.components[_1].reach if self.dead_leaf is DeadLeaf.UNUSABLE else 1",
        "1",
    ),
    Fault(
        "dead leaf: what is on the host does not count",
        "Residencies._is_dead",
        "not _1.resident(DEVICE, _2) and (not _1.resident(HOST, _2))",
        "not _1.resident(DEVICE, _2)",
    ),
    Fault(
        "dead leaf: what left with it is not counted",
        "RadixTree.evict",
        "_1 - _2.num_resident[_3][_4]",
        "0",
    ),
]


def killer(copy: Path) -> str | None:
    """The first test that fails on the copy, None if none does."""
    seen = failing_test(copy, TESTS, TIMEOUT_S, HIRADIX_TREE_RUNS=RUNS)
    return seen and seen.rpartition("/")[2]


def plantings() -> list[Planting]:
    return [Planting((fault.name,), fault, killer) for fault in FAULTS]


def main(words: list[str]) -> int:
    warm()
    chosen = [planting for planting in plantings() if all(word in planting.fault.name for word in words)]
    return survey(("fault", "seen by"), chosen)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
