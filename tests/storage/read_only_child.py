"""For `test_read_only`: serve from a folder that is mounted read-only. FOLDER BACKEND..."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

from tests.contracts.storage import hits, keys_of, put
from tests.storage.test_removed import opened


def main() -> None:
    folder, *names = sys.argv[1:]
    said = {}
    for name in names:
        with contextlib.closing(opened(name, Path(folder) / name, touch_interval_s=0)) as store:
            found = sum(hits(store, keys_of(8)))
            stored = sum(put(store, keys_of(4, start=100)))
            figures = store.stats()
            said[name] = [found, stored, figures["put_missed_read_only"], figures["read_only"]]
    print(json.dumps(said))


if __name__ == "__main__":
    main()
