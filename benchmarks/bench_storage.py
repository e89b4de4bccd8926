"""How fast is the disk backend, beside the disk itself, a copy in memory, and other stores?

    make bench-storage                       unpacks the peers under build/peers, then runs it all
    python benchmarks/bench_storage.py [--quick] [--peers NAME,...|none] [--only TEXT,...] [--out FILE]

One process for each store, all over the same number of bytes; the stores take turns, and each row is the
median of its rounds; rows named `best` have each one's best round, which is nearest to an idle machine. GB/s
is 1e9 bytes per second. `cold`: taken out of the page cache with fadvise, which cachestat confirms. `warm`:
read ahead into it. `as stored`: there since they were written, which is how pages of a store come there. raw:
the same bytes of our files, 2 MiB at a time by four threads with O_DIRECT. pread: the same through the page
cache, by one thread; pread_pair: by two. memcpy: one thread. `per processor second`: by the time the calling
thread was on a processor, the kernel's part included, which other work on the machine does not lengthen.
`spin`: a thread of pure Python runs in the store's process and wants the interpreter lock. hiradix is the
backend behind its guard, LRU and log on. Writes build/bench/storage.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from common import Report, Row, median_and_best, shown

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))
PEERS = ("sglang-file", "lmcache-disk", "lmcache-direct", "nixl")
DIRECT = ("lmcache-direct", "nixl")  # read past the page cache, whatever is in it
UNVERIFIED = "hiradix-unverified"
COLUMNS = ("raw", "pread", "pread_pair", "memcpy", UNVERIFIED, *PEERS)
SPIN_PAGES = 256


class Worker:
    """A store's process. One order at a time."""

    def __init__(self, name: str, folder: Path, log: Any):
        self.name = name
        self.folder = folder / name
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "storage_peers" / "worker.py"), name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        )  # fmt: skip

    def do(self, what: str, **order: Any) -> Any:
        """Send an order and wait for its answer; RuntimeError if it failed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": what, **order}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended: see the log")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{self.name}: {answer['error']}")
        return answer["answer"]

    def call(self, name: str, **how: Any) -> float:
        """Seconds of one call."""
        return float(self.do("call", call=name, **how))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


class Bench:
    """All stores with pages of one size."""

    def __init__(
        self,
        workers: dict[str, Worker],
        page_bytes: int,
        total_bytes: int,
        rounds: int,
        leave_out: Callable[[str], None],
    ):
        self._workers, self._leave_out = workers, leave_out
        self.stores = {name: worker for name, worker in workers.items() if name != "physical"}
        self.ours, self.physical = workers["hiradix"], workers["physical"]
        self.page_bytes, self.num_pages, self.rounds = page_bytes, total_bytes // page_bytes, rounds
        self.total_bytes = total_bytes
        self.size = f"{page_bytes >> 10}KiB" if page_bytes < 1 << 20 else f"{page_bytes >> 20}MiB"

    def beside_unverified(self) -> Bench:
        """The same of our store alone, beside another that does not verify what it reads."""
        other = Worker(UNVERIFIED, self.ours.folder.parent, None)
        workers = {"hiradix": self.ours, UNVERIFIED: other, "physical": self.physical}
        return Bench(workers, self.page_bytes, self.total_bytes, self.rounds, self._leave_out)

    def peers_that(self, do: Callable[[Worker], Any]) -> Iterator[tuple[str, Any]]:
        """What `do` gives for each store, one after the other; a peer that fails takes no further part."""
        for name, store in list(self.stores.items()):
            try:
                answer = do(store)
            except RuntimeError as error:
                if name in ("hiradix", UNVERIFIED):
                    raise
                self._leave_out(f"{name}, pages of {self.size}: {error}")
                del self.stores[name], self._workers[name]
                store.close()
            else:
                yield name, answer

    def all_that(self, do: Callable[[Worker], Any]) -> None:
        """The same for what has no answer."""
        for _ in self.peers_that(do):
            pass

    def open(self) -> None:
        """Begin with empty stores."""
        how = {"num_pages": self.num_pages, "page_bytes": self.page_bytes}

        def begin(store: Worker) -> None:
            own = {"verify": "off"} if store.name == UNVERIFIED else {}
            store.do("open", folder=str(store.folder), options=own, **how)

        self.all_that(begin)
        self.physical.do("open", folder=str(self.physical.folder), **how)

    def rates(self, before: Callable[[Worker], None], limit: int, **how: Any) -> dict[str, list[float]]:
        """GB/s of each in rounds in which all take turns; also of plain reads where they are cached."""
        limits = ("raw", "memcpy") if before is cold else ("raw", "pread", "pread_pair", "memcpy")
        found: dict[str, list[float]] = {name: [] for name in (*self.stores, *limits)}
        limit = min(limit, self.num_pages)
        self._find_pages()

        def read(store: Worker) -> float:
            before(store)
            return store.call("get", **how)

        for _ in range(self.rounds):
            for name, seconds in self.peers_that(read):
                found[name].append(limit * self.page_bytes / seconds / 1e9)
                if name == "hiradix":
                    for limit_name in limits:
                        seconds = self.physical.call(limit_name)
                        found[limit_name].append(self.total_bytes / seconds / 1e9)
        return {name: values for name, values in found.items() if name in (*self.stores, *limits)}

    def _find_pages(self) -> None:
        """Have the disk's own speed measured where our pages are."""
        self.physical.do("read where", spans=self.ours.do("spans"))

    def costs(self, before: Callable[[Worker], None]) -> dict[str, list[float]]:
        """Reads and copies, in GB of each second that the calling thread was on a processor."""
        found: dict[str, list[float]] = {"hiradix": [], "pread": [], "memcpy": []}
        self._find_pages()
        for _ in range(self.rounds):
            before(self.ours)
            for name, times in found.items():
                worker, call = (self.ours, "get") if name == "hiradix" else (self.physical, name)
                times.append(self.total_bytes / worker.call(call, clock="thread") / 1e9)
        return found

    def put(self) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {name: [] for name in self.stores}
        for number in range(1 if self.rounds == 1 else max(3, self.rounds // 2)):
            for name, seconds in self.peers_that(partial(self._put, is_full=number > 0)):
                found[name].append(self.total_bytes / seconds / 1e9)
        self.all_that(lambda store: store.call("check"))
        return {name: values for name, values in found.items() if name in self.stores}

    @staticmethod
    def _put(store: Worker, is_full: bool) -> float:
        if is_full:
            store.do("call", call="clear")
        return store.call("put")

    def exists(self) -> list[Row]:
        """us for 128 keys, the same objects each time."""

        def asked(store: Worker) -> float:
            return statistics.median(store.call("exists", repeat=20) * 1e6 for _ in range(self.rounds))

        found = dict(self.peers_that(asked))
        bare = statistics.median(self.ours.call("bare_exists", repeat=20) * 1e6 for _ in range(self.rounds))
        peers = {name: value for name, value in found.items() if name != "hiradix"}
        return [
            Row("disk exists of 128 reused keys, without guard", "time", "us", bare, peers),
            Row("disk exists of 128 reused keys", "time", "us", found["hiradix"], peers),
        ]

    def rows(self, case: str, found: dict[str, list[float]]) -> list[Row]:
        """The median over the rounds, and each one's best round."""
        return median_and_best(f"disk {case} {self.size}", "GB/s", found)


def cold(store: Worker) -> None:
    """Take the files out of the page cache, or fail: a warm read must not pass for a cold one.

    Done by this process, as `warm` is: the store's own has not just used up its share of the processor.
    """
    uncache(store.do("files"))


def uncache(paths: Sequence[str | Path]) -> None:
    """Take these files out of the page cache, or fail."""
    from hiradix.storage.backends.disk.kernel import cached_share

    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        size = os.fstat(fd).st_size
        os.fdatasync(fd)
        for _ in range(5):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            if not size or cached_share(fd, 0, size) < 0.001:
                break
        else:
            raise RuntimeError(f"{path}: {cached_share(fd, 0, size):.1%} stay in the page cache")
        os.close(fd)


def warm(store: Worker) -> None:
    """Bring the files into the page cache."""
    for path in store.do("files"):
        with open(path, "rb", buffering=0) as file:
            while file.read(1 << 24):
                pass


def as_stored(store: Worker, num_bytes: int) -> None:
    """The files are in the page cache as they came there, by being written; fails where some left it."""
    from hiradix.storage.backends.disk.kernel import cached_share

    if store.name in DIRECT:
        return
    cached = 0.0
    for path in store.do("files"):
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            cached += size * cached_share(file.fileno(), 0, size) if size else 0
    if cached < num_bytes:
        raise RuntimeError(f"{store.name}: {cached:.0f} of {num_bytes} bytes are in the page cache")


def cases(bench: Bench) -> list[tuple[str, Callable[[], list[Row]]]]:
    """Names and what measures them, in an order in which each finds the pages stored."""

    def read(
        case: str, before: Callable[[Worker], None], scattered: bool, spin: bool
    ) -> Callable[[], list[Row]]:
        def measure() -> list[Row]:
            limit = SPIN_PAGES if spin else bench.num_pages
            bench.all_that(lambda store: store.do("choose", scattered=scattered, limit=limit))
            return bench.rows(case, bench.rates(before, limit, spin=spin))

        return measure

    def verified() -> list[Row]:
        """The store as it is by default beside itself with `verify=off`, in the same rounds."""
        alone, rows = bench.beside_unverified(), []
        try:
            alone.open()
            alone.put()
            for case, before in (("cold", cold), ("warm", warm)):
                rates = alone.rates(before, alone.num_pages)
                rows += alone.rows(f"get {case}, every page verified", rates)
        finally:
            alone.stores[UNVERIFIED].close()
        return rows

    def costs(case: str, before: Callable[[Worker], None]) -> Callable[[], list[Row]]:
        def measure() -> list[Row]:
            bench.ours.do("choose", scattered=False, limit=bench.num_pages)
            return bench.rows(f"{case}, per processor second", bench.costs(before))

        return measure

    def kept(store: Worker) -> None:
        as_stored(store, bench.total_bytes)

    found = [
        ("put", lambda: bench.rows("put", bench.put())),
        ("get as stored", read("get as stored", kept, False, False)),
        ("get as stored cost", costs("get as stored", kept)),
        ("get cold", read("get cold", cold, False, False)),
        ("get cold scattered", read("get cold, scattered", cold, True, False)),
        ("get warm", read("get warm", warm, False, False)),
        ("get warm cost", costs("get warm", warm)),
        ("get cold spin", read("get cold, spin", cold, False, True)),
        ("get warm spin", read("get warm, spin", warm, False, True)),
        ("get cold verified", verified),
    ]
    return [*found[:-1], ("exists", bench.exists), found[-1]] if bench.num_pages >= 128 else found


REOPENING = """
import random, sys, time
from hiradix.storage import PageFingerprint, StorageContext
from hiradix.storage.backends.disk import DiskBackend, size_for
from hiradix.storage.backends.disk.store import PageRecord

count, rng = int(sys.argv[1]), random.Random(1)
keys = {"disk_storage_path": sys.argv[2], "max_size": size_for(count, 4096), "min_free_space": 0}
context = StorageContext(PageFingerprint("m"), keys, 4096)
backend = DiskBackend(context)
store = backend._store
with store.locked(), store.mutex:
    places = store.allocate(count, ())
    store.publish([PageRecord(rng.randbytes(32).hex(), None, place, 4096, 1) for place in places])
backend.close()
begin, cpu = time.perf_counter(), time.process_time()
backend = DiskBackend(context)
begin, cpu = time.perf_counter() - begin, time.process_time() - cpu
assert backend.stats()["pages_recovered"] == count
print(begin, cpu)
"""


def reopening(num_pages: int) -> list[Row]:
    """Seconds to open a store whose log names so many pages, and how many of them on the processor."""
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        command = [sys.executable, "-c", REOPENING, str(num_pages), folder]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    case, (taken, cpu) = f"disk reopening, {num_pages:,} pages", map(float, done.stdout.split())
    return [Row(case, "time", "s", taken), Row(f"{case}, processor time", "time", "s", cpu)]


def table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """A line per row; beside each peer how many times its rate ours is."""
    lines = [["case", "unit", "hiradix", *columns]]
    for row in rows:
        line = [row.case, row.unit, shown(row.ours)]
        for name in columns:
            value = row.peers.get(name)
            if value is None:
                line.append("-")
                continue
            times = row.ours / value if row.unit == "GB/s" else value / row.ours
            line.append(f"{shown(value)} ({times:.2f}x)")
        lines.append(line)
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="32 MiB, one round, 1,000 pages reopened")
    parser.add_argument("--size", type=int, default=256, help="MiB in each store (256)")
    parser.add_argument("--rounds", type=int, default=7, help="7")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--only", default="", help="cases whose name has one of these texts, comma separated")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench" / "storage.json")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "build" / "bench", help="where the stores are made"
    )
    return parser.parse_args()


def start(report: Report, names: Sequence[str], folder: Path, log: Any) -> dict[str, Worker]:
    """Workers of the stores that can be opened here; the others are left out by name."""
    workers = {}
    for name in ("hiradix", "physical", *names):
        worker = Worker(name, folder, log)
        try:
            worker.do("open", folder=str(worker.folder), num_pages=1, page_bytes=1 << 16)
            workers[name] = worker
        except RuntimeError as error:
            if name in ("hiradix", "physical"):
                raise
            report.leave_out(str(error))
            worker.close()
    return workers


def main() -> None:
    """Run the cases, print and write their rows."""
    options = arguments()
    names = [name for name in options.peers.split(",") if name not in ("", "none")]
    texts = [text for text in options.only.split(",") if text]
    total, rounds = (32 << 20, 1) if options.quick else (options.size << 20, options.rounds)
    begin = time.monotonic()
    options.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="stores-", dir=options.folder))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    log = open(options.out.with_suffix(".log"), "w", encoding="utf-8")
    with log, Report(options.out, COLUMNS, table=table) as report:
        report.about |= {"peers": names, "disk": _disk(options.out.parent)}
        workers = start(report, names, folder, log)
        for page_bytes in (256 << 10, 2 << 20):
            bench = Bench(workers, page_bytes, total, rounds, report.leave_out)
            bench.open()
            for name, measure in cases(bench):
                if name != "put" and texts and not any(text in name for text in texts):
                    continue
                since = time.monotonic()
                report.add(measure())
                print(f"{name} {bench.size}: {time.monotonic() - since:.0f} s", file=sys.stderr, flush=True)
        for worker in workers.values():
            worker.close()
        shutil.rmtree(folder)
        report.about["seconds"] = round(time.monotonic() - begin)
        if not texts or any(text in "reopening" for text in texts):
            report.optional("reopening", lambda: reopening(1_000 if options.quick else 100_000))


def _disk(folder: Path) -> str:
    """The file system the stores are on."""
    lines = Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
    mounts = [line.split()[:3] for line in lines if str(folder).startswith(line.split()[1])]
    device, where, kind = max(mounts, key=lambda mount: len(mount[1]))
    return f"{kind} on {Path(device).name}"


if __name__ == "__main__":
    main()
