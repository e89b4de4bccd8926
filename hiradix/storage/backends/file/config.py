"""Keys of the `file` backend. `docs/storage-keys.md` lists them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hiradix.errors import ConfigError
from hiradix.storage.kit.options import MAX_TIMEOUT_S, Options, flag

PATH_ENV = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
PATH_KEY = "file_storage_path"


def default_path() -> str:
    """The user's cache directory: unlike a world-writable one, nobody else can put pages into it."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    return os.path.join(base, "hiradix", "pages")


@dataclass(frozen=True)
class FileConfig:
    """Where pages go and how much room they may take.

    path_source: what an error about the path names. max_bytes: cap on all page files below `path`, of all
    models and processes together. min_free_bytes: what must stay free on the file system. touch_interval_s:
    how old a file's mtime gets before a read renews it. lock_timeout_s: longest wait for the directory's
    lock.
    """

    path: Path
    path_source: str = flag(PATH_KEY)
    max_bytes: int = 32 << 30
    min_free_bytes: int = 1 << 30
    touch_interval_s: float = 60.0
    lock_timeout_s: float = 1.0
    fsync: bool = False
    checksum: bool = True

    @staticmethod
    def from_mapping(values: Mapping[str, Any]) -> FileConfig:
        """Reads and checks the keys; raises ConfigError naming the bad one."""
        options = Options(values)
        path, source = options.text(PATH_KEY, default_path()), flag(PATH_KEY)
        if os.environ.get(PATH_ENV):
            path, source = os.environ[PATH_ENV], PATH_ENV
        if not path:
            raise ConfigError(f"{source} is empty")
        options.accept("enable_metadata_cache", "metadata_ttl", "eviction_ratio")
        config = FileConfig(
            path=Path(path).expanduser().absolute(),
            path_source=source,
            max_bytes=options.size("max_size", FileConfig.max_bytes),
            min_free_bytes=options.size("min_free_space", FileConfig.min_free_bytes),
            touch_interval_s=options.seconds("touch_interval_s", FileConfig.touch_interval_s),
            lock_timeout_s=options.seconds(
                "lock_timeout_s", FileConfig.lock_timeout_s, maximum=MAX_TIMEOUT_S
            ),
            fsync=options.boolean("fsync", FileConfig.fsync),
            checksum=options.boolean("checksum", FileConfig.checksum),
        )
        options.finish("file")
        return config

    def check_page(self, num_bytes: int) -> None:
        """Raises ConfigError when not even one page file of `num_bytes` fits under the cap."""
        if num_bytes > self.max_bytes:
            raise ConfigError(
                f"{flag('max_size')} {self.max_bytes} is less than one page file, {num_bytes} bytes"
            )
