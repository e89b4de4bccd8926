"""How fast are the remote backends, beside the plain client of each server and the physical limit?

    make bench-storage-remote                          installs servers and clients, then runs it all
    python benchmarks/bench_storage_remote.py [--quick] [--only TEXT,...] [--out FILE]

Real servers on loopback, on the same processors as the clients. hiradix is the backend behind its guard, with
seals and checksums. The ways of a case take turns, and each row is the median of its rounds; rows named
`best` have each one's best round, rows named `per processor second` how much is moved for each second that
the client's process was on a processor, the kernel's part included, which other work on the machine does not
lengthen. GB/s is 1e9 bytes per second; a batch is 128 pages. Stores are emptied before each set, untimed.
Pages lie in memory with huge pages, as host pools do. tcp: as many bytes from another process over loopback.
memcpy: one thread. redis-py: MGET, and SET in a pipeline. boto3: get_object and put_object, 16 at a time,
which is SGLang's way. library: what ours is built on, called alone, without seals, checks or copies of ours:
obstore, 16 at a time; mooncake, a batch at a time; for redis a bare socket, on which commands that were made
before are sent while replies are counted, which is what server and kernel can do for one client; checked:
the same with a checksum of each page, the least that sealed pages take. s3: SeaweedFS, which hashes, stores
and passes on; `s3 in memory`: a server that does nothing but move bytes (storage_peers/s3_memory.py), so
that it is the clients that are compared. Writes build/bench/storage-remote.json.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from common import Report, Row, median_and_best

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from storage_peers.remote import (  # noqa: E402
    Pages,
    Way,
    boto3_way,
    checked,
    memcpy,
    mooncake_way,
    obstore_way,
    opened,
    ours,
    redis_py,
    redis_socket,
    tcp,
)

from hiradix.apps.demo.process import free_port  # noqa: E402
from tests.storage_servers import servers  # noqa: E402

PEERS = ("tcp", "memcpy", "redis-py", "boto3", "library", "checked")


def rows_of(case: str, ways: dict[str, Way], pages: Pages, rounds: int) -> list[Row]:
    """All ways take turns; `hiradix` is one of them."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    costs: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            way.before()
            begin, used = time.perf_counter(), time.process_time()
            way.run()
            costs[name].append(pages.total_bytes / (time.process_time() - used) / 1e9)
            found[name].append(pages.total_bytes / (time.perf_counter() - begin) / 1e9)
    middle, best = median_and_best(f"{case} {pages.size}", "GB/s", found)
    return [middle, best, median_and_best(f"{case} {pages.size}, per processor second", "GB/s", costs)[0]]


def measure_redis(folder: Path, pages: Pages, rounds: int) -> list[Row]:
    with servers.redis_like("redis-server", folder / "redis", "--maxmemory", "2gb") as server:
        store = opened("redis", pages, url=f"redis://127.0.0.1:{server.port}/0", timeout_s=30.0)
        (put, get), (their_put, their_get) = ours(store, pages), redis_py(server.port, pages)
        bare_put, bare_get = redis_socket(server.port, pages)
        ways = {"hiradix": put, "redis-py": their_put, "library": bare_put}
        rows = rows_of("redis set", ways, pages, rounds)
        with tcp(pages) as receive:
            ways = {"hiradix": get, "redis-py": their_get, "library": bare_get, "tcp": receive}
            rows += rows_of("redis get", ways, pages, rounds)
        store.close()
    return rows


def measure_s3(folder: Path, pages: Pages, rounds: int) -> list[Row]:
    rows: list[Row] = []
    for case, server in (
        ("s3", servers.weed(folder / "weed", 100)),
        ("s3 in memory", _memory_server(folder)),
    ):
        with server:
            store = opened("s3", pages, **servers.s3_keys(server, "ours"))
            (put, get), (their_put, their_get) = ours(store, pages), boto3_way(server.port, store, pages)
            bare_put, bare_get = obstore_way(store, pages)
            ways = {"hiradix": put, "boto3": their_put, "library": bare_put}
            rows += rows_of(f"{case} set", ways, pages, min(rounds, 3) if case == "s3" else rounds)
            with tcp(pages) as receive:
                ways = {"hiradix": get, "boto3": their_get, "library": bare_get, "tcp": receive}
                rows += rows_of(f"{case} get", ways, pages, rounds)
            store.close()
    return rows


def _memory_server(folder: Path) -> servers.Server:
    port = free_port()
    command = [sys.executable, str(ROOT / "benchmarks" / "storage_peers" / "s3_memory.py"), str(port)]
    return servers.Server(command, port, folder / "s3-memory")


def measure_mooncake(folder: Path, pages: Pages, rounds: int) -> list[Row]:
    """Own memory, then that of another process."""
    rows: list[Row] = []
    with servers.mooncake_master(folder / "master") as master, ExitStack() as members:
        for where, lent in (("own memory", 6 * pages.total_bytes), ("another process", 0)):
            if not lent:
                member = servers.mooncake_member(master, folder / "member", 6 * pages.total_bytes)
                members.enter_context(member)
            keys = {"master_server_address": f"127.0.0.1:{master.port}", "global_segment_size": lent}
            store = opened("mooncake", pages, **keys)
            (put, get), (bare_put, bare_get) = ours(store, pages), mooncake_way(store, pages)
            case, copy = f"mooncake {where}", memcpy(pages)
            checked_put, checked_get = checked(pages, (bare_put, bare_get))
            ways = {"hiradix": put, "library": bare_put, "checked": checked_put, "memcpy": copy}
            rows += rows_of(f"{case} set", ways, pages, rounds)
            with tcp(pages) as receive:
                ways = {"hiradix": get, "library": bare_get, "checked": checked_get, "memcpy": copy}
                rows += rows_of(f"{case} get", ways | {"tcp": receive}, pages, rounds)
            assert store.clear()
            store.close()
    return rows


CASES = {"redis": measure_redis, "s3": measure_s3, "mooncake": measure_mooncake}


def main() -> None:
    """Run the cases, print and write their rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8 MiB and one round, pages of 256 KiB")
    parser.add_argument("--only", default="", help=f"some of {', '.join(CASES)}, comma separated")
    out = ROOT / "build" / "bench" / "storage-remote.json"
    parser.add_argument("--out", type=Path, default=out)
    options = parser.parse_args()
    total, rounds = (8 << 20, 1) if options.quick else (256 << 20, 5)
    with Report(options.out, PEERS) as report:
        for name in options.only.split(",") if options.only else CASES:
            for page_bytes in (256 << 10,) if options.quick else (256 << 10, 2 << 20):
                pages = Pages(page_bytes, total)
                with tempfile.TemporaryDirectory() as folder:
                    measure = partial(CASES[name], Path(folder), pages, rounds)
                    report.attempt(f"{name}, pages of {pages.size}", measure)


if __name__ == "__main__":
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    main()
