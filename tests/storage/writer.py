"""A process of its own that stores pages. Run by the crash and multi-process tests.

    python writer.py FOLDER MODE FIRST COUNT MAX_SIZE

Prints "ready", then for every batch of the pages FIRST .. FIRST+COUNT the keys that were acknowledged, on one
line. MODE "once": each page once. "forever": round and round, deleting what it finds, until killed.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from hiradix.storage import Batch
from tests.contracts.storage import blank, bytes_of, content, keys_of, page_of
from tests.storage.files import open_file

PAGE_BYTES = 200_000
BATCH = 8


def main(folder: str, mode: str, first: int, count: int, max_size: int) -> None:
    store = open_file(Path(folder), max_size=max_size)
    print("ready", flush=True)
    for start in itertools.chain.from_iterable(rounds(mode, first, count)):
        keys = keys_of(min(BATCH, first + count - start), start)
        if mode == "forever":
            store.delete(keys[::2])
        stored = store.put(Batch.of(keys), [page_of(key, PAGE_BYTES) for key in keys])
        print(" ".join(key for key, ok in zip(keys, stored) if ok), flush=True)
        into = [blank(PAGE_BYTES) for _ in keys]
        for key, page, ok in zip(keys, into, store.get(Batch.of(keys), into)):
            assert not ok or content(page) == bytes_of(key, PAGE_BYTES), f"wrong bytes under {key}"
    store.close()


def rounds(mode: str, first: int, count: int) -> itertools.chain[range] | list[range]:
    batches = range(first, first + count, BATCH)
    return [batches] if mode == "once" else itertools.chain.from_iterable(itertools.repeat([batches]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
