"""What does `quantise` `fp8` cost, and what does it do to answers?

    make bench-quantise                     installs a redis server where there is none, then runs it all
    python benchmarks/bench_quantise.py [--quick] [--only speed|answers] [--out FILE]

Speed: pages of bfloat16 from normal distributions, one for each column of 64; GB/s is 1e9 bytes per second of
the pages as they are, not as stored, by one thread. All take turns, and each row is the median of its rounds;
rows named `best` have each one's best round, rows named `per processor second` how much is moved for each
second that this process was on a processor, which other work on the machine does not lengthen. hiradix is the
quantised form; exact: the same store without `quantise`; zstd: level 1, of exact pages; fp8-zstd: of codes;
memcpy: one thread. `disk` and `redis` are whole stores with guard and checksums, redis on loopback. `as
stored`: in the page cache since it was written.

Answers: SmolLM2-135M and the demo's conversations, greedy. Each turn is computed anew (the reference, whose
answers are the history of what follows), and asked of engines whose device and host tiers are emptied before,
so that all whole pages of the turns before come from a `disk` store: quantised (hiradix), or exact. The first
turns only fill the stores. Log-probabilities: of the reference's ten likeliest first tokens. Writes
build/bench/quantise.json.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import Report, Row, machine

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench_storage import uncache  # noqa: E402
from bench_storage_remote import rows_of  # noqa: E402
from quantised_answers import measure_answers  # noqa: E402
from storage_peers.remote import Pages, Way, memcpy  # noqa: E402
from storage_peers.systems import host_memory  # noqa: E402

from hiradix.storage.kit.call_threads import scatter  # noqa: E402

PEERS = ("exact", "zstd", "fp8-zstd", "memcpy")
WAYS: dict[str, dict[str, Any]] = {
    "hiradix": {"quantise": "fp8"},
    "exact": {},
    "zstd": {"compression": "zstd"},
    "fp8-zstd": {"quantise": "fp8", "compression": "zstd"},
}
ELEMENTS = "bfloat16"
FOLDER = ROOT / "build" / "bench"


class KVPages(Pages):
    """Pages of floats, and as many to read into: what is stored stays what it was."""

    def __init__(self, page_bytes: int, total_bytes: int):
        super().__init__(page_bytes, total_bytes)
        random = torch.Generator().manual_seed(1)
        spread = torch.exp(torch.randn(64, generator=random))
        floats = torch.from_numpy(self.cells).view(torch.bfloat16).view(-1, 64)
        for part in floats.split(1 << 18):
            part.copy_(torch.randn(part.shape, generator=random) * spread)
        memory = memoryview(host_memory(total_bytes))
        self.targets = [memory[at : at + page_bytes] for at in range(0, total_bytes, page_bytes)]


def measure_codes(pages: KVPages, rounds: int) -> list[Row]:
    """Coding alone, page by page, and how long a page is then."""
    import zstandard

    from hiradix.storage.wrappers.quantise import decode, encode

    packer, reader = zstandard.ZstdCompressor(level=1, write_checksum=True), zstandard.ZstdDecompressor()
    codes = [encode([view], ELEMENTS) for view in pages.views]
    exact, both = [packer.compress(view) for view in pages.views], [packer.compress(code) for code in codes]

    def to_place(index: int, code: bytearray) -> None:
        scatter(decode(memoryview(code), ELEMENTS, pages.page_bytes), [pages.targets[index]])

    encoding: dict[str, Callable[[int], Any]] = {
        "hiradix": lambda i: encode([pages.views[i]], ELEMENTS),
        "zstd": lambda i: packer.compress(pages.views[i]),
        "fp8-zstd": lambda i: packer.compress(encode([pages.views[i]], ELEMENTS)),
    }
    decoding: dict[str, Callable[[int], Any]] = {
        "hiradix": lambda i: to_place(i, codes[i]),
        "zstd": lambda i: scatter(memoryview(reader.decompress(exact[i])), [pages.targets[i]]),
        "fp8-zstd": lambda i: to_place(i, bytearray(reader.decompress(both[i]))),
    }
    rows = []
    for case, ways in (("encode", encoding), ("decode", decoding)):
        runs = {name: Way(_each(pages, way)) for name, way in ways.items()}
        rows += rows_of(case, runs | {"memcpy": memcpy(pages)}, pages, rounds)
    coded = {"zstd": exact, "fp8-zstd": both}
    shares = {name: sum(map(len, made)) / pages.total_bytes for name, made in coded.items()}
    ours = len(codes[0]) / pages.page_bytes
    return [*rows, Row(f"length {pages.size}", "stored", "share", ours, {"exact": 1.0, **shares})]


def _each(pages: KVPages, way: Callable[[int], Any]) -> Callable[[], None]:
    def run() -> None:
        for index in range(len(pages.views)):
            way(index)

    return run


class Store:
    """A backend with some of the wrappers, and all pages."""

    def __init__(self, name: str, pages: KVPages, keys: dict[str, Any]):
        from hiradix.storage import PageFingerprint, StorageContext, open_storage

        self.pages, keys = pages, {"deadline_s": 120.0, **keys}
        context = StorageContext(PageFingerprint("bench"), keys, pages.page_bytes, elements=ELEMENTS)
        self.storage = open_storage(name, context)

    def clear(self) -> None:
        assert self.storage.clear()

    def put(self) -> None:
        for keys, views in self.pages.batches():
            assert all(self.storage.put(keys, [[view] for view in views]))

    def get(self) -> None:
        targets = iter(self.pages.targets)
        for keys, _ in self.pages.batches():
            assert all(self.storage.get(keys, [[next(targets)] for _ in keys]))


def measure_disk(pages: KVPages, rounds: int, folder: Path) -> list[Row]:
    """Put, then get from the page cache and from the disk."""
    where = {name: folder / f"{name}-{pages.size}" for name in ("hiradix", "exact")}
    size = 2 * pages.total_bytes + (64 << 20)
    stores = {}
    for name, path in where.items():
        keys = {"disk_storage_path": str(path), "max_size": size, "min_free_space": 0}
        stores[name] = Store("disk", pages, keys | WAYS[name])

    def cold(name: str) -> Callable[[], None]:
        return lambda: uncache([path for path in where[name].rglob("*") if path.is_file()])

    cases = {
        "put": {name: Way(store.put, store.clear) for name, store in stores.items()},
        "get as stored": {name: Way(store.get) for name, store in stores.items()},
        "get cold": {name: Way(store.get, cold(name)) for name, store in stores.items()},
    }
    return _rows("disk", cases, stores, rounds)


def measure_redis(pages: KVPages, rounds: int, folder: Path) -> list[Row]:
    """A store over loopback, which takes pages of any length, so compressed ones too."""
    from tests.storage_servers import servers

    limits = ("--maxmemory", "2gb", "--maxmemory-policy", "allkeys-lru")
    with servers.redis_like("redis-server", folder / f"redis-{pages.size}", *limits) as server:
        keys = {"url": f"redis://127.0.0.1:{server.port}/0", "timeout_s": 30.0}
        stores = {
            name: Store("redis", pages, {**keys, "key_prefix": name, **way}) for name, way in WAYS.items()
        }
        cases = {
            "put": {name: Way(store.put, store.clear) for name, store in stores.items()},
            "get": {name: Way(store.get) for name, store in stores.items()},
        }
        return _rows("redis", cases, stores, rounds)


def _rows(backend: str, cases: dict[str, dict[str, Way]], stores: dict[str, Store], rounds: int) -> list[Row]:
    """All cases in order, then the stores are closed."""
    pages, rows = stores["hiradix"].pages, []
    for case, runs in cases.items():
        rows += rows_of(f"{backend} {case}", runs | {"memcpy": memcpy(pages)}, pages, rounds)
    for store in stores.values():
        store.storage.close()
    return rows


def measure_speed(report: Report, options: argparse.Namespace, folder: Path) -> Iterator[list[Row]]:
    """Rows of each case as they come; those that need a server, into the report if there is one."""
    total, rounds = (8 << 20, 2) if options.quick else (128 << 20, 9)
    for page_bytes in (256 << 10,) if options.quick else (256 << 10, 2 << 20):
        pages = KVPages(page_bytes, total)
        yield measure_codes(pages, rounds)
        yield measure_disk(pages, rounds, folder)
        report.optional(f"redis {pages.size}", partial(measure_redis, pages, rounds, folder))


def main() -> None:
    """Run the cases, print and write their rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8 MiB, one conversation")
    parser.add_argument("--only", default="speed,answers", help="speed or answers")
    parser.add_argument("--model-path", help="another model than SmolLM2-135M, as transformers loads it")
    parser.add_argument("--out", type=Path, default=FOLDER / "quantise.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    FOLDER.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    scratch = tempfile.TemporaryDirectory(prefix="quantise-", dir=FOLDER)
    with scratch as folder, Report(options.out, PEERS) as report:
        if "speed" in options.only:
            for some in measure_speed(report, options, Path(folder)):
                report.add(_told(some))
        if "answers" in options.only:
            model = options.model_path
            report.add(_told(measure_answers(Path(folder), model, options.quick)))
        report.about |= {"seconds": round(time.monotonic() - begin), "load_at_end": machine()["load_average"]}


def _told(rows: Sequence[Row]) -> list[Row]:
    """These rows, whose cases are named on standard error: a run takes minutes."""
    print(f"measured: {', '.join(dict.fromkeys(row.case for row in rows))}", file=sys.stderr, flush=True)
    return list(rows)


if __name__ == "__main__":
    main()
