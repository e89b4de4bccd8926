"""Processes that write until they are killed. Run by test_crash.

    python crash_writer.py FOLDER MAX_SIZE

Reads orders "SEED KEYS" from standard input; for each it forks a child, which opens the store and puts and
deletes pages at random until somebody kills it, and prints "dead" when that has happened. The child prints
"pid N", then before and after every call what it is about, so that whoever reads knows what the store should
hold: "begin put K:V ...", "end put K:V ...". A page's version is the number of its call.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

from hiradix.storage import Batch
from tests.contracts.storage import key_of
from tests.disk.places import open_disk

PAGE_BYTES, BATCH = 16384, 12


def bytes_of_version(number: int, version: int) -> bytes:
    return random.Random(f"{number} {version}").randbytes(PAGE_BYTES)


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def write_until_killed(place: Path, max_size: int, seed: int, num_keys: int) -> None:
    """In the child: never returns."""
    say(f"pid {os.getpid()}")
    rng, version = random.Random(seed), 1_000_000 * seed
    store = open_disk(place, page_bytes=PAGE_BYTES, max_size=max_size, direct_writes=bool(seed % 2))
    while True:
        version += 1
        numbers = rng.sample(range(num_keys), BATCH)
        there = [n for n in numbers if store.exists([key_of(n)])]
        if there:
            what = "delete " + " ".join(map(str, there))
            say(f"begin {what}")
            store.delete([key_of(n) for n in there])
            say(f"end {what}")
        what = "put " + " ".join(f"{n}:{version}" for n in numbers)
        say(f"begin {what}")
        pages = [[memoryview(bytes_of_version(n, version))] for n in numbers]
        assert all(store.put(Batch.of([key_of(n) for n in numbers]), pages))
        say(f"end {what}")


def main(folder: str, max_size: str) -> None:
    for line in sys.stdin:
        seed, num_keys = map(int, line.split())
        child = os.fork()
        if not child:
            try:
                write_until_killed(Path(folder), int(max_size), seed, num_keys)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        say("dead" if os.WIFSIGNALED(status) else "failed")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
