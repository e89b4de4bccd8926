"""Plants faults in a copy of the SGLang adapter, one at a time, and shows which test sees each.

    build/sglang-venv/bin/python -m tests.sglang.planted            all; the table of docs/lab/engines.md
    build/sglang-venv/bin/python -m tests.sglang.planted flush      those whose name contains the word

Only the tests run that need no server; a few seconds each. On demand.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from contextlib import redirect_stdout
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.planting import Fault, Planting, survey

TESTS = ("tests/sglang/test_contract.py", "tests/sglang/test_named_after_upstream.py")
TIMEOUT_S = 300.0

FAULTS = [
    Fault(
        "abort: the lock is not given back",
        "HiRadixPrefixCache.unlock",
        "self._tree.unlock(_receipt(_1))",
        "pass",
    ),
    Fault(
        "abort: the request is still counted as running",
        "HiRadixPrefixCache.on_release",
        "self.inner.forget_request(_1)",
        "pass",
    ),
    Fault(
        "abort: a prefetch goes on",
        "HiRadixHostCache.release_aborted_request",
        "self.inner.release_aborted_request(_1)",
        "pass",
    ),
    Fault(
        "checkpoint: the lock of the chunk before stays",
        "HiRadixPrefixCache.checkpoint",
        "self._tree.unlock(_1)",
        "pass",
    ),
    Fault(
        "checkpoint: the request keeps the handle of the chunk before",
        "HiRadixPrefixCache.checkpoint",
        "TreeLock(_1, _2), _1",
        "TreeLock(_1, _2), _a1.last_node",
    ),
    Fault(
        "checkpoint: the row still names pages that were freed",
        "HiRadixPrefixCache.checkpoint",
        "_1.device.pages is not _2",
        "False",
    ),
    Fault(
        "checkpoint: what the tree took is the request's to free",
        "HiRadixPrefixCache.checkpoint",
        "_1.cache_protected_len = _2.end * _3",
        "pass",
    ),
    Fault(
        "checkpoint: uses are not counted",
        "HiRadixPrefixCache.checkpoint",
        "self.inner.count_use(_1)",
        "pass",
    ),
    Fault(
        "checkpoint: the extra key is left out",
        "HiRadixPrefixCache._request_key",
        "_1.extra_key",
        "None",
    ),
    Fault(
        "checkpoint: the last bigram's second token is left out",
        "HiRadixPrefixCache._request_key",
        "_1 * self.page_size + self._lookahead",
        "_1 * self.page_size",
    ),
    Fault(
        "match: the salt is left out",
        "Front._key",
        "self._space(_1.extra_key, _2, _1.is_bigram or self.is_eagle)",
        "self._space(_1.extra_key, None, _1.is_bigram or self.is_eagle)",
    ),
    Fault(
        "match: the limit is not looked at",
        "Front._key",
        "len(_2) if _1.limit is None else _1.limit",
        "len(_2) if True else 0",
    ),
    Fault(
        "load back: a host hit that was not loaded is counted",
        "HiRadixHostCache.init_load_back",
        "not _1 or self.inner.cache.load_back(_2, _3) is None",
        "self.inner.cache.load_back(_2, _3) is None and (not _1)",
    ),
    Fault(
        "load back: a part of what was promised",
        "HiRadixHostCache.init_load_back",
        "_1.loadable_node.end == _2.end",
        "True",
    ),
    Fault(
        "load back: the quota is not looked at",
        "HiRadixHostCache.init_load_back",
        "self.inner.cache.load_back(_1, _2)",
        "self.inner.cache.load_back(_1, None)",
    ),
    Fault(
        "match: the request's array stays held",
        "RadixKey.tokens",
        "return self._tokens if self._array is None else as_tokens(self._array)[:self.num_tokens]",
        (
            "self._tokens = self._tokens if len(self._tokens) else "
            "as_tokens(self._array)[:self.num_tokens]\nreturn self._tokens"
        ),
    ),
    Fault(
        "checkpoint: the key is what was matched",
        "HiRadixPrefixCache._request_key",
        "_1.resume(_2, _3, _4)",
        "_1.resume(_1._array, _3, _4)",
    ),
    Fault(
        "load back: one without a batch never starts",
        "HiRadixHostCache.init_load_back",
        "self._has_unclaimed_load = True",
        "pass",
    ),
    Fault(
        "load back: layers are read without waiting",
        "gate_reads",
        "_1.token_to_kv_pool_allocator.get_kvcache().register_layer_transfer_counter(_2)",
        "pass",
    ),
    Fault(
        "load back: the forward is not told what it waits for",
        "HiRadixHostCache.ready_to_load_host_cache",
        "return self.inner.ready_to_load_host_cache()",
        "self.inner.ready_to_load_host_cache()\nreturn -1",
    ),
    Fault(
        "storage: an adapter's weights are left out of the name",
        "Front.named",
        "self.adapters.named(_1) if isinstance(_1, str) else _1",
        "_1",
    ),
    Fault(
        "storage: the extra key is left out of the name",
        "HiRadixHostCache.prefetch_from_storage",
        "self._space(_1, _2 or None, self.is_eagle)",
        "self._space(None, _2 or None, self.is_eagle)",
    ),
    Fault(
        "storage: the salt is left out of the name",
        "HiRadixHostCache.prefetch_from_storage",
        "self._space(_1, _2 or None, self.is_eagle)",
        "self._space(_1, None, self.is_eagle)",
    ),
    Fault(
        "storage: names begin at what is asked for",
        "HiRadixHostCache.prefetch_from_storage",
        "np.concatenate([as_tokens(_1), as_tokens(_2)])",
        "as_tokens(_2)",
    ),
    Fault(
        "storage: a prefetch is told from its start",
        "HiRadixHostCache.pop_prefetch_loaded_span",
        "_1 * self.page_size",
        "0",
        at=1,
    ),
    Fault(
        "free: evicted pages twice",
        "AllocatorPort.free_pages",
        "self._free_ids(self._numbers.of(_1))",
        "self._free_ids(self._numbers.of(_1))\nself._free_ids(self._numbers.of(_1))",
    ),
    Fault(
        "free: a page that is begun stays",
        "Rows.free",
        "-(-_1 // _2)",
        "_1 // _2",
    ),
    Fault(
        "free: parts of a row are taken for one",
        "HiRadixPrefixCache.free_kv_row",
        "len(_1) > 1 or self._has_windows",
        "self._has_windows",
    ),
    Fault(
        "flush: the tiers forget what is under way",
        "Front.reset",
        "self.inner.reset",
        "self.inner.tree.clear",
    ),
    Fault(
        "priority does not reach the tree",
        "HiRadixPrefixCache.checkpoint",
        "_1.priority or 0",
        "0",
    ),
    Fault(
        "touch: a waiting prefix is no hotter",
        "HiRadixPrefixCache.touch_prefix",
        "_1.unlock(_1.lock(_1.match(_2).device_node, DEVICE))",
        "_1.match(_2)",
    ),
    Fault(
        "windows: what a load back brings of them is not told",
        "HiRadixPrefixCache.match_prefix",
        "_1 and self._has_windows",
        "False",
    ),
    Fault(
        "windows: a lock is given back without its receipt",
        "HiRadixPrefixCache.dec_lock_ref",
        "self.inner.dec_lock_ref(_1 or _2)",
        "self.inner.dec_lock_ref(_2)",
    ),
]


class FirstFailure:
    """A pytest plugin that keeps the name of what failed first."""

    name: str | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self.name is None:
            self.name = report.nodeid.rpartition("/")[2].partition("[")[0]


def judge(copy: Path, told: Connection) -> None:
    """In a process of its own: run the tests of the copy on the code of the copy."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("hiradix", "tests")]:
        del sys.modules[name]
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    first = FirstFailure()
    with redirect_stdout(io.StringIO()) as output:
        status = pytest.main(["-x", "-q", "--noconftest", "-p", "no:cacheprovider", *TESTS], plugins=[first])
    assert status == 0 or first.name, f"no test ran to see it:\n{output.getvalue()[-4000:]}"
    told.send(first.name)


def killer(copy: Path) -> str | None:
    """The first test that fails on the copy, None if none does. SGLang is there already."""
    receiving, sending = Pipe(False)
    child = get_context("fork").Process(target=judge, args=(copy, sending))
    child.start()
    sending.close()
    try:
        found: str | None = receiving.recv() if receiving.poll(TIMEOUT_S) else "never ends"
    finally:
        child.kill()
        child.join()
    return found and f"`{found}`"


def main(words: list[str]) -> int:
    importlib.import_module("tests.sglang.rig")
    chosen = [fault for fault in FAULTS if all(word in fault.name for word in words)]
    return survey(("fault", "seen by"), [Planting((fault.name,), fault, killer) for fault in chosen])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
