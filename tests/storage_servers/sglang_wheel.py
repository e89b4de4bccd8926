"""SGLang 0.5.23's storage modules out of its wheel, without the rest of SGLang."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.storage_peers.install import SGLANG

PACKAGES = ("sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.utils")


@contextmanager
def sglang_modules() -> Iterator[types.ModuleType]:
    """`sglang.srt.mem_cache.hicache_storage`, unmodified; its packages are empty but for their folders.

    One helper that the file backend takes from a module with heavy imports is written out here.
    """
    assert SGLANG.is_dir(), "SGLang's wheel is not unpacked: run `make test-storage`, which does it"
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "sglang"}
    try:
        for name in PACKAGES:
            package = types.ModuleType(name)
            package.__path__ = [str(SGLANG.joinpath(*name.split(".")))]
            sys.modules[name] = package
        common = types.ModuleType("sglang.srt.utils.common")
        common.human_readable_int = lambda text: int(text)  # type: ignore[attr-defined]
        sys.modules["sglang.srt.utils.common"] = common
        yield importlib.import_module("sglang.srt.mem_cache.hicache_storage")
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
            del sys.modules[name]
        sys.modules.update(hidden)
