"""Could a warm read be a copy out of a mapping of the file, in place of a read through the page cache?

    python benchmarks/bench_storage_mapped.py [--size MIB] [--rounds N] [--folder PATH] [--quick] [--out FILE]

GB of each second that the thread was on a processor, the kernel's part included, into memory as host pools
have it; medians of rounds in which all ways take turns. memcpy: memory to memory. preadv: a page at a time,
and 32 MiB at a time. mapped: a copy out of a mapping that is kept; nothing keeps its pages from being taken
away while they are copied, which ends the process if they cannot be read again. The others say first that
the page is there: MADV_POPULATE_READ and mlock on the kept mapping, a mapping for each page. process_vm_readv
has the kernel copy out of the mapping, which fails where a page is not to be had. `written`: the file is in
the page cache since it was written; `read ahead`: it was read into it. Writes
build/bench/storage-mapped.json.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from common import Report, Row

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from storage_peers.systems import host_memory  # noqa: E402

from hiradix.os_memory import address_of  # noqa: E402

POPULATE_READ = 22
PIECE = 32 << 20
_libc = ctypes.CDLL(None, use_errno=True)
_pointer, _size, _int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_libc.mmap.restype = _pointer
_libc.mmap.argtypes = (_pointer, _size, _int, _int, _int, ctypes.c_long)
_libc.madvise.argtypes = (_pointer, _size, _int)
_libc.memmove.argtypes = (_pointer, _pointer, _size)
for _name in ("mlock", "munlock", "munmap"):
    getattr(_libc, _name).argtypes = (_pointer, _size)
_libc.process_vm_readv.argtypes = (_int, _pointer, ctypes.c_ulong, _pointer, ctypes.c_ulong, ctypes.c_ulong)
Copy = Callable[[int, int], None]


class Span(ctypes.Structure):
    _fields_ = [("begin", _pointer), ("length", _size)]


class Ways:
    """All ways to bring `num_bytes` at an offset of the file to the same offset of memory."""

    def __init__(self, fd: int, num_bytes: int):
        self._fd, self._pid = fd, os.getpid()
        self._memory, self._source = (memoryview(host_memory(num_bytes)) for _ in range(2))
        self._to, self._from = address_of(self._memory), address_of(self._source)
        self._mapped = _libc.mmap(None, num_bytes, 1, 1, fd, 0)
        _must(_libc.madvise(self._mapped, num_bytes, POPULATE_READ))

    def all(self) -> dict[str, Copy]:
        """By name, memcpy first."""
        return {
            "memcpy": lambda at, size: _libc.memmove(self._to + at, self._from + at, size),
            "preadv": lambda at, size: self._read(at, size),
            "preadv 32MiB": lambda at, size: self._read(at, PIECE) if at % PIECE == 0 else None,
            "mapped": self._copy,
            "mapped, populate": self._populated,
            "mapped, mlock": self._locked,
            "mapped anew": self._anew,
            "process_vm_readv": self._by_kernel,
        }

    def _read(self, at: int, size: int) -> None:
        os.preadv(self._fd, [self._memory[at : at + size]], at)

    def _copy(self, at: int, size: int) -> None:
        _libc.memmove(self._to + at, self._mapped + at, size)

    def _populated(self, at: int, size: int) -> None:
        _must(_libc.madvise(self._mapped + at, size, POPULATE_READ))
        self._copy(at, size)

    def _locked(self, at: int, size: int) -> None:
        _must(_libc.mlock(self._mapped + at, size))
        self._copy(at, size)
        _libc.munlock(self._mapped + at, size)

    def _anew(self, at: int, size: int) -> None:
        mapped = _libc.mmap(None, size, 1, 1, self._fd, at)
        _must(_libc.madvise(mapped, size, POPULATE_READ))
        _libc.memmove(self._to + at, mapped, size)
        _libc.munmap(mapped, size)

    def _by_kernel(self, at: int, size: int) -> None:
        to, source = Span(self._to + at, size), Span(self._mapped + at, size)
        done = _libc.process_vm_readv(self._pid, ctypes.byref(to), 1, ctypes.byref(source), 1, 0)
        _must(0 if done == size else -1)


def _must(answer: int) -> None:
    if answer:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def rates(ways: Ways, num_bytes: int, page_bytes: int, rounds: int) -> dict[str, float]:
    """GB per processor second of each way."""
    found: dict[str, list[float]] = {name: [] for name in ways.all()}
    for _ in range(rounds):
        for name, copy in ways.all().items():
            begin = time.thread_time()
            for at in range(0, num_bytes, page_bytes):
                copy(at, page_bytes)
            found[name].append(num_bytes / (time.thread_time() - begin) / 1e9)
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> None:
    """Run all ways on a file that was written and on one that was read ahead; print their rates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", type=int, default=128, help="MiB, a multiple of 32 (128)")
    parser.add_argument("--rounds", type=int, default=9, help="9")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "bench")
    parser.add_argument("--quick", action="store_true", help="32 MiB and one round")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench" / "storage-mapped.json")
    options = parser.parse_args()
    if options.quick:
        options.size, options.rounds = 32, 1
    options.folder.mkdir(parents=True, exist_ok=True)
    with Report(options.out, ("memcpy",), ours="rate") as report:
        for how in ("written", "read ahead"):
            measure(report, how, options)


def measure(report: Report, how: str, options: argparse.Namespace) -> None:
    """Rows of a file that came into the page cache so."""
    num_bytes = options.size << 20
    with tempfile.NamedTemporaryFile(dir=options.folder, buffering=0) as file:
        for _ in range(options.size):
            file.write(os.urandom(1 << 20))
        if how == "read ahead":
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            while file.read(1 << 24):
                pass
        ways = Ways(file.fileno(), num_bytes)
        for page_bytes in (256 << 10, 2 << 20):
            found = rates(ways, num_bytes, page_bytes, options.rounds)
            for name, rate in found.items():
                case = f"{how}, {page_bytes >> 10} KiB: {name}"
                report.add([Row(case, "rate", "GB/s", rate, {"memcpy": found["memcpy"]})])


if __name__ == "__main__":
    main()
