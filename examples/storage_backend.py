"""A storage backend of your own: pages as files in one folder, registered by name and used behind the guard.

The guard brings what every store needs: a checksum and the model's fingerprint with each page, a deadline and
a circuit breaker for each call. So a backend may be this small, and a damaged file is a miss, never a wrong
answer.
Check yours with the suite that ours pass: `hiradix.testing.storage`.
"""

import os
import tempfile
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from hiradix.errors import StorageError
from hiradix.storage import (
    Batch,
    Page,
    PageFingerprint,
    StorageBackend,
    StorageContext,
    check_key,
    open_storage,
    register_storage_backend,
)  # fmt: skip


class FolderBackend(StorageBackend):
    """One file per page. No cap: nothing is ever evicted."""

    def __init__(self, context: StorageContext):
        self._folder = Path(str(context.extra_config["folder_path"])) / context.fingerprint.digest()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._is_open = True

    def _paths(self, keys: Sequence[str]) -> list[Path]:
        if not self._is_open:
            raise StorageError("the store is closed")
        return [self._folder / check_key(key) for key in keys]

    def exists(self, batch: Batch) -> int:
        return len(list(takewhile(Path.is_file, self._paths(batch))))

    def get(self, batch: Batch, into: Sequence[Page]) -> list[bool]:
        return [self._read(path, page) for path, page in zip(self._paths(batch), into, strict=True)]

    def _read(self, path: Path, page: Page) -> bool:
        try:
            with open(path, "rb") as file:
                return all(file.readinto(part) == part.nbytes for part in page) and not file.read(1)
        except FileNotFoundError:
            return False

    def put(self, batch: Batch, pages: Sequence[Page]) -> list[bool]:
        for path, page in zip(self._paths(batch), pages, strict=True):
            if not path.exists():  # a key that is there keeps its bytes
                with tempfile.NamedTemporaryFile(dir=self._folder, prefix=".", delete=False) as file:
                    file.writelines(page)
                os.replace(file.name, path)  # readers see a whole page or none
        return [True] * len(batch)

    def delete(self, keys: Sequence[str]) -> None:
        for path in self._paths(keys):
            path.unlink(missing_ok=True)

    def clear(self) -> None:
        for path in self._folder.iterdir():
            path.unlink(missing_ok=True)

    def close(self) -> None:
        self._is_open = False


if __name__ == "__main__":
    register_storage_backend("folder", f"{__name__}:FolderBackend")
    fingerprint = PageFingerprint("my-model", "main", "bfloat16", "page_first", page_size=16)
    with tempfile.TemporaryDirectory() as folder:
        store = open_storage("folder", StorageContext(fingerprint, {"folder_path": folder}, page_bytes=1024))
        store.put(["page-a", "page-b"], [[memoryview(b"A" * 1024)], [memoryview(b"B" * 1024)]])
        print(store.exists(["page-a", "page-b", "page-c"]))  # 2

        damaged = next(Path(folder).glob("*/*page-b*"))
        damaged.write_bytes(b"X" + damaged.read_bytes()[1:])
        pages = [bytearray(1024), bytearray(1024)]
        print(store.get(["page-a", "page-b"], [[memoryview(page)] for page in pages]))  # [True, False]
        print(pages[0] == b"A" * 1024)  # True
        store.close()
