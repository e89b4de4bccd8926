"""Plants faults in a copy of the SGLang adapter, one at a time, and shows which test sees each.

    build/sglang-venv/bin/python -m tests.sglang.planted            all; prints the table of docs/sglang.md
    build/sglang-venv/bin/python -m tests.sglang.planted flush      those whose name contains the word

Only the tests run that need no server; a few seconds each. On demand; `make test` checks that each fault
still fits the code.
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

from tests.planting import Fault, Planting, refuse_stale, survey

TESTS = ("tests/sglang/test_contract.py", "tests/sglang/test_named_after_upstream.py")
TIMEOUT_S = 300.0
CACHE, TIERS, PORTS, FRONT, BUILD = (
    f"adapters/sglang/{name}.py" for name in ("cache", "tiers", "ports", "front", "build")
)
KEY = "tree/key.py"

FAULTS = [
    Fault(
        "abort: the lock is not given back",
        CACHE,
        "            self._tree.unlock(_receipt(lock))",
        "            pass",
    ),
    Fault(
        "abort: the request is still counted as running",
        CACHE,
        "        self.inner.forget_request(req)",
        "        pass",
    ),
    Fault(
        "abort: a prefetch goes on",
        TIERS,
        "        self.inner.release_aborted_request(handle)",
        "        pass",
    ),
    Fault("checkpoint: the lock of the chunk before stays", CACHE, "        self._tree.unlock(held)\n", ""),
    Fault(
        "checkpoint: the request keeps the handle of the chunk before",
        CACHE,
        "TreeLock(node, taken), node\n",
        "TreeLock(node, taken), held.node\n",
    ),
    Fault(
        "checkpoint: the row still names pages that were freed",
        CACHE,
        "if node.device.pages is not given:",
        "if False:",
    ),
    Fault(
        "checkpoint: what the tree took is the request's to free",
        CACHE,
        "kv.cache_protected_len = node.end * size",
        "kv.cache_protected_len = held.node.end * size",
    ),
    Fault("checkpoint: uses are not counted", CACHE, "        self.inner.count_use(req)\n", ""),
    Fault(
        "checkpoint: the extra key is left out",
        CACHE,
        "_space(req.extra_key,",
        "_space(None,",
    ),
    Fault(
        "checkpoint: the last bigram's second token is left out",
        CACHE,
        "num_pages * self.page_size + self._lookahead if",
        "num_pages * self.page_size if",
    ),
    Fault("match: the salt is left out", FRONT, "key.extra_key, salt,", "key.extra_key, None,"),
    Fault(
        "match: the limit is not looked at", FRONT, "if key.limit is None else key.limit", "if True else 0"
    ),
    Fault(
        "load back: a host hit that was not loaded is counted",
        TIERS,
        "if not is_whole or self.inner.cache.load_back(match, quota) is None:",
        "if self.inner.cache.load_back(match, quota) is None and not is_whole:",
    ),
    Fault(
        "load back: a part of what was promised",
        TIERS,
        "is_whole = match.loadable_node.end == node.end",
        "is_whole = True",
    ),
    Fault(
        "load back: the quota is not looked at", TIERS, "load_back(match, quota)", "load_back(match, None)"
    ),
    Fault(
        "match: the request's array stays held",
        KEY,
        "return self._tokens if self._array is None else as_tokens(self._array)[: self.num_tokens]",
        "self._tokens = self._tokens if len(self._tokens) else as_tokens(self._array)[: self.num_tokens]\n"
        "        return self._tokens",
    ),
    Fault(
        "checkpoint: the key is what was matched",
        CACHE,
        "if matched.resume(tokens, num_tokens, space):",
        "if matched.resume(matched._array, num_tokens, space):",
    ),
    Fault("load back: one without a batch never starts", TIERS, "self._has_unclaimed_load = True", "pass"),
    Fault(
        "load back: layers are read without waiting",
        BUILD,
        "    params.token_to_kv_pool_allocator.get_kvcache().register_layer_transfer_counter(gate)\n",
        "",
    ),
    Fault(
        "load back: the forward is not told what it waits for",
        TIERS,
        "        return self.inner.ready_to_load_host_cache()",
        "        self.inner.ready_to_load_host_cache()\n        return -1",
    ),
    Fault(
        "storage: an adapter's weights are left out of the name",
        TIERS,
        "RadixKey.first(tokens, len(tokens), self._space(extra_key, cache_salt or None, self.is_eagle))",
        "RadixKey(tokens, extra_key, self.is_eagle, cache_salt=cache_salt or None)",
    ),
    Fault(
        "storage: the extra key is left out of the name",
        TIERS,
        "len(tokens), self._space(extra_key, cache_salt",
        "len(tokens), self._space(None, cache_salt",
    ),
    Fault(
        "storage: the salt is left out of the name",
        TIERS,
        "self._space(extra_key, cache_salt or None, self",
        "self._space(extra_key, None, self",
    ),
    Fault(
        "storage: names begin at what is asked for",
        TIERS,
        "np.concatenate([as_tokens(matched_prefix_tokens), as_tokens(new_input_tokens)])",
        "as_tokens(new_input_tokens)",
    ),
    Fault(
        "storage: a prefetch is told from its start",
        TIERS,
        "first * self.page_size if num_pages",
        "0 if num_pages",
    ),
    Fault(
        "free: evicted pages twice",
        PORTS,
        "            self._free_ids(self._numbers.of(pages))\n",
        "            self._free_ids(self._numbers.of(pages))\n" * 2,
    ),
    Fault(
        "free: a page that is begun stays",
        PORTS,
        "        if 0 < end - start <= size:\n",
        "        end -= end % size\n        if 0 < end - start <= size:\n",
    ),
    Fault("free: parts of a row are taken for one", CACHE, "if len(ranges) > 1 or", "if"),
    Fault(
        "flush: the tiers forget what is under way",
        FRONT,
        "        self.inner.reset()",
        "        self.inner.tree.clear()",
    ),
    Fault("priority does not reach the tree", CACHE, "req.priority or 0, start", "0, start"),
    Fault(
        "touch: a waiting prefix is no hotter",
        CACHE,
        "            tree.unlock(tree.lock(tree.match(own).device_node, DEVICE))",
        "            tree.match(own)",
    ),
    Fault(
        "windows: what a load back brings of them is not told",
        CACHE,
        "if num_host and self._has_windows else 0",
        "if False else 0",
    ),
    Fault(
        "windows: a lock is given back without its receipt",
        CACHE,
        "dec_lock_ref(held or node)",
        "dec_lock_ref(node)",
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
    refuse_stale(FAULTS)
    importlib.import_module("tests.sglang.rig")
    chosen = [fault for fault in FAULTS if all(word in fault.name for word in words)]
    return survey(("fault", "seen by"), [Planting((fault.name,), fault, killer) for fault in chosen])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
