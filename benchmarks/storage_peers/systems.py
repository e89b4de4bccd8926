"""The stores that the storage benchmark compares, each behind the same few calls.

A system stores `num_pages` pages of `page_bytes` each out of one pool of host memory, and reads them back
into the same places. Keys are page hashes; a batch is 128 of them, as the transfer workers' are.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import sys
import threading
import types
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]
BATCH = 128
RAW_PIECE = 2 << 20
Span = tuple[str, int, int]  # of a file: path, first byte, number of bytes


def host_memory(num_bytes: int) -> Any:
    """uint8 [num_bytes], as host pools are: a disk reads slower, and unevenly, into pages of 4 KiB."""
    from hiradix.memory.host_memory import allocate

    return allocate(num_bytes, pin=False, unit=1)[0].numpy()


class Pool:
    """A host pool's memory, with random bytes in it."""

    def __init__(self, num_pages: int, page_bytes: int):
        self.num_bytes = num_pages * page_bytes
        self.page_bytes = page_bytes
        self.cells = host_memory(self.num_bytes)
        self.memory = memoryview(self.cells)
        self.cells[:] = np.random.default_rng(1).integers(0, 256, self.num_bytes, dtype=np.uint8)
        self.pages = [self.memory[at : at + page_bytes] for at in range(0, self.num_bytes, page_bytes)]
        rng = random.Random(2)
        self.keys = [rng.randbytes(32).hex() for _ in range(num_pages)]

    def huge_share(self) -> float:
        """How much of the memory is in huge pages: which reads past the page cache depend on."""
        begin, found, inside = int(self.cells.ctypes.data), 0, False
        for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
            name, _, rest = line.partition(" ")
            if not name.endswith(":"):
                first, last = (int(text, 16) for text in name.split("-"))
                inside = first < begin + self.num_bytes and begin < last
            elif inside and name == "AnonHugePages:":
                found += int(rest.split()[0]) << 10
        return min(1.0, found / self.num_bytes)


class System:
    """What a worker calls; a system fills in `_open`, `_put`, `_get` and, if it can, `exists` and `close`."""

    def __init__(self, folder: Path, num_pages: int, page_bytes: int, options: dict[str, Any]):
        self.folder = folder
        self.options = options
        self.pool = Pool(num_pages, page_bytes)
        self.order = list(range(num_pages))
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._open()

    def choose(self, scattered: bool, limit: int) -> None:
        """Which pages `get` reads: the first `limit` in the order they were stored, or all over the place."""
        self.order = list(range(len(self.pool.keys)))
        if scattered:
            random.Random(3).shuffle(self.order)
        del self.order[limit:]

    def put(self) -> None:
        for start in range(0, len(self.pool.keys), BATCH):
            self._put(range(start, min(start + BATCH, len(self.pool.keys))))

    def get(self) -> None:
        for start in range(0, len(self.order), BATCH):
            self._get(self.order[start : start + BATCH])

    def check(self) -> None:
        """Read everything into empty memory; raise if it is not what was stored."""
        self.choose(False, len(self.pool.keys))
        before = self.pool.cells.copy()
        self.pool.cells[:] = 0
        self.get()
        assert np.array_equal(before, self.pool.cells), "not what was stored"

    def exists(self) -> None:
        raise NotImplementedError

    def files(self) -> list[Path]:
        return [path for path in self.folder.rglob("*") if path.is_file()]

    def clear(self) -> None:
        """Empty the store, so that `put` stores again."""
        raise NotImplementedError

    def close(self) -> None:
        """End threads."""

    def _open(self) -> None:
        raise NotImplementedError

    def _put(self, indices: Sequence[int]) -> None:
        raise NotImplementedError

    def _get(self, indices: Sequence[int]) -> None:
        raise NotImplementedError


class Hiradix(System):
    """The disk backend behind its guard: deadline, breaker, LRU and log as in a server."""

    def _open(self) -> None:
        from hiradix.storage import PageFingerprint, StorageContext, open_storage

        keys = {
            "disk_storage_path": str(self.folder),
            "max_size": 4 * self.pool.num_bytes + (4 << 20),
            "min_free_space": 0,
            "deadline_s": 120.0,
        }
        fingerprint = PageFingerprint("bench")
        context = StorageContext(fingerprint, keys | self.options, self.pool.page_bytes)
        self.storage = open_storage("disk", context)

    def _put(self, indices: Sequence[int]) -> None:
        pool = self.pool
        assert all(self.storage.put([pool.keys[i] for i in indices], [[pool.pages[i]] for i in indices]))

    def _get(self, indices: Sequence[int]) -> None:
        pool = self.pool
        assert all(self.storage.get([pool.keys[i] for i in indices], [[pool.pages[i]] for i in indices]))

    def exists(self) -> None:
        assert self.storage.exists(self.pool.keys[:BATCH]) == BATCH

    def bare_exists(self) -> None:
        assert self.storage.backend.exists(self.pool.keys[:BATCH]) == BATCH

    def files(self) -> list[Path]:
        return list(self.folder.glob("*.pages"))

    def spans(self) -> list[Span]:
        """Where the pages are, in the order of slots."""
        from hiradix.storage.backends.disk.config import slot_bytes
        from hiradix.storage.backends.disk.log import pages_in
        from hiradix.storage.backends.disk.segments import SegmentFolder

        size, folder = slot_bytes(self.pool.page_bytes), SegmentFolder(self.folder, False)
        found: list[Span] = []
        for segment, slot in sorted(entry.place for entry in pages_in(self.folder)):
            path, begin, num_bytes = folder.path(segment), slot * size, size
            if found and (path, begin) == (found[-1][0], found[-1][1] + found[-1][2]):
                _, begin, before = found.pop()
                num_bytes += before
            found.append((path, begin, num_bytes))
        return found

    def clear(self) -> None:
        assert self.storage.clear()

    def close(self) -> None:
        self.storage.close()


class Physical(System):
    """No store: spans of files read past the page cache and through it, and a copy in memory.

    Of the files where the store has its pages just then: a virtual disk reads some extents half as fast as
    others.
    """

    def _open(self) -> None:
        self.to_read: list[Span] = []
        self.executor, self.pair = ThreadPoolExecutor(4), ThreadPoolExecutor(2)
        self.other = host_memory(self.pool.num_bytes)
        self.other.fill(1)

    def raw(self) -> None:
        """As many bytes as the pool has, 2 MiB each by four threads."""
        self._read(os.O_DIRECT, self.executor.map)

    def pread(self) -> None:
        """The same through the page cache, by this thread."""
        self._read(0, map)

    def pread_pair(self) -> None:
        """The same by two threads."""
        self._read(0, self.pair.map)

    def _read(self, flags: int, run: Callable[..., Iterable[bool]]) -> None:
        jobs, start, memory = [], 0, self.pool.memory
        files = {path: os.open(path, os.O_RDONLY | flags) for path, _, _ in self.to_read}
        for path, begin, num_bytes in self.to_read:
            for offset in range(begin, begin + num_bytes, RAW_PIECE):
                length = min(RAW_PIECE, begin + num_bytes - offset)
                jobs.append((files[path], memory[start : start + length], offset))
                start += length
        assert start == self.pool.num_bytes, f"{start} bytes, the stores have {self.pool.num_bytes}"
        assert all(run(lambda job: os.preadv(job[0], [job[1]], job[2]) == len(job[1]), jobs))
        for fd in files.values():
            os.close(fd)

    def memcpy(self) -> None:
        size = self.pool.page_bytes
        for start in range(0, self.pool.num_bytes, size):
            np.copyto(self.pool.cells[start : start + size], self.other[start : start + size])


class SGLangFile(System):
    """SGLang 0.5.23's HiCacheFile, its own class unmodified; it has no threads."""

    def _open(self) -> None:
        import torch
        from imports import serve_missing

        serve_missing("sglang", "sglang-0.5.23-storage", ())
        from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

        config = HiCacheStorageConfig(0, 1, 0, 1, 0, 1, False, False, True, "bench")
        self.store = HiCacheFile(config, str(self.folder))
        cells = torch.from_numpy(self.pool.cells)
        self.tensors = list(cells.split(self.pool.page_bytes))

    def _put(self, indices: Sequence[int]) -> None:
        keys, values = [self.pool.keys[i] for i in indices], [self.tensors[i] for i in indices]
        assert self.store.batch_set(keys, values)

    def _get(self, indices: Sequence[int]) -> None:
        keys, values = [self.pool.keys[i] for i in indices], [self.tensors[i] for i in indices]
        assert all(value is not None for value in self.store.batch_get(keys, values))

    def exists(self) -> None:
        assert self.store.batch_exists(self.pool.keys[:BATCH]) == BATCH

    def clear(self) -> None:
        assert self.store.clear()


class LMCacheDisk(System):
    """LMCache 0.5.6's LocalDiskBackend, its own class unmodified, with its four threads.

    Its host allocator is replaced by one that hands out the pool's pages, and its C++ kernels, which the disk
    path does not use, by mocks.
    """

    def _open(self) -> None:
        import torch
        from imports import serve_missing

        serve_missing("lmcache", "lmcache-0.5.6", ("lmcache.c_ops", "lmcache.native_storage_ops"))
        from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        config = types.SimpleNamespace(
            cache_policy="LRU", local_disk=str(self.folder), local_disk_path_sharding="by_gpu",
            local_cpu=False, extra_config=self.options or None, max_local_disk_size=64.0,
            lmcache_instance_id="bench", get_extra_config_value=lambda key, default=None: default,
        )  # fmt: skip
        self.free: list[Any] = []
        cpu = types.SimpleNamespace(allocate=lambda shape, dtype, fmt: self.free.pop())
        self.store = LocalDiskBackend(config, self.loop, cpu, "cpu")
        cells = torch.from_numpy(self.pool.cells)
        self.objects = [
            _MemoryObject(t, p) for t, p in zip(cells.split(self.pool.page_bytes), self.pool.pages)
        ]
        self.keys = [_Key(key) for key in self.pool.keys]

    def _put(self, indices: Sequence[int]) -> None:
        done = threading.Semaphore(0)
        keys, values = [self.keys[i] for i in indices], [self.objects[i] for i in indices]
        self.store.batched_submit_put_task(keys, values, on_complete_callback=lambda key: done.release())
        for _ in indices:
            done.acquire()

    def _get(self, indices: Sequence[int]) -> None:
        self.free = [self.objects[i] for i in reversed(indices)]
        assert all(self.store.batched_get_blocking([self.keys[i] for i in indices]))

    def exists(self) -> None:
        assert all(self.store.contains(key) for key in self.keys[:BATCH])

    def clear(self) -> None:
        for key in self.keys:
            self.store.remove(key)

    def close(self) -> None:
        self.store.close()
        self.loop.call_soon_threadsafe(self.loop.stop)


class _MemoryObject:
    """A page of the pool, as LMCache's backend sees host memory."""

    def __init__(self, tensor: Any, view: memoryview):
        self.tensor = tensor
        self.byte_array = view
        self.metadata = types.SimpleNamespace(
            shape=tensor.shape, dtype=tensor.dtype, fmt=None, cached_positions=None
        )

    def get_physical_size(self) -> int:
        return len(self.byte_array)

    def ref_count_up(self) -> None:
        pass

    def ref_count_down(self) -> None:
        pass


class _Key:
    """What LMCache's backend needs of a CacheEngineKey."""

    def __init__(self, text: str):
        self.text = self.chunk_hash = text

    def to_string(self) -> str:
        return self.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and other.text == self.text


SYSTEMS = {
    "hiradix": Hiradix, "hiradix-unverified": Hiradix, "physical": Physical,
    "sglang-file": SGLangFile, "lmcache-disk": LMCacheDisk,
}  # fmt: skip
