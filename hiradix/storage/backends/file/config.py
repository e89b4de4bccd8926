"""Keys of the `file` backend. `docs/storage-keys.md` lists them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from hiradix.errors import ConfigError
from hiradix.settings import MAX_TIMEOUT_S, OPEN, Setting, Type, field_of, setting
from hiradix.storage.kit.options import CHECKSUM, flag, read_keys

PATH_ENV = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
PATH_KEY = "file_storage_path"


def default_path() -> str:
    """The user's cache directory: unlike a world-writable one, nobody else can put pages into it."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    return os.path.join(base, "hiradix", "pages")


def _sglangs(name: str, type: Type) -> Setting:
    text = "SGLang's, without effect: the index is always in memory"
    return Setting(name, type, None, text, over_http=OPEN)


@dataclass(frozen=True)
class FileConfig:
    """The folder of pages and its cap.

    path_source: what an error about the path names.
    """

    ALSO: ClassVar = (
        _sglangs("enable_metadata_cache", Type.BOOL),
        _sglangs("metadata_ttl", Type.NUMBER),
        Setting(
            "eviction_ratio",
            Type.NUMBER,
            None,
            "SGLang's, without effect: eviction removes what is needed and at most 1/64 of the cap more",
            over_http=OPEN,
        ),
    )

    path: Path = setting(
        PATH_KEY,
        Type.FOLDER,
        default_path,
        f"the directory; made if missing. The environment variable `{PATH_ENV}` beats it",
        env=PATH_ENV,
        to=lambda text: Path(text).expanduser().absolute(),
        default_text="`$XDG_CACHE_HOME/hiradix/pages`, else `~/.cache/hiradix/pages`",
        over_http=OPEN,
    )
    path_source: str = flag(PATH_KEY)
    max_bytes: int = setting(
        "max_size",
        Type.SIZE,
        32 << 30,
        "cap on all page files in the directory, of all models and processes together",
        over_http=OPEN,
    )
    min_free_bytes: int = setting(
        "min_free_space",
        Type.SIZE,
        1 << 30,
        "what must stay free on the file system; pages are evicted, then refused, to keep it so",
        over_http=OPEN,
    )
    touch_interval_s: float = setting(
        "touch_interval_s",
        Type.SECONDS,
        60.0,
        "a read renews a file's time stamp (its recency for other processes and after a restart) when it is "
        "older than this",
        over_http=OPEN,
    )
    lock_timeout_s: float = setting(
        "lock_timeout_s",
        Type.SECONDS,
        1.0,
        "longest wait for the directory's lock; after it a put fails",
        maximum=MAX_TIMEOUT_S,
        over_http=OPEN,
    )
    fsync: bool = setting(
        "fsync",
        Type.BOOL,
        False,
        "flush each page before it gets its name. Without it a power failure may cost pages, never "
        "correctness",
        over_http=OPEN,
    )
    checksum: bool = field_of(CHECKSUM)

    @staticmethod
    def from_mapping(values: Mapping[str, Any]) -> FileConfig:
        """Reads and checks the keys; raises ConfigError naming the bad one."""
        source = PATH_ENV if os.environ.get(PATH_ENV) else flag(PATH_KEY)
        if source == PATH_ENV:
            values = {**values, PATH_KEY: os.environ[PATH_ENV]}
        if values.get(PATH_KEY) == "":
            raise ConfigError(f"{source} is empty")
        return dataclasses.replace(read_keys(FileConfig, values, "file"), path_source=source)

    def check_page(self, num_bytes: int) -> None:
        """Raises ConfigError when not even one page file of `num_bytes` fits under the cap."""
        if num_bytes > self.max_bytes:
            raise ConfigError(
                f"{flag('max_size')} {self.max_bytes} is less than one page file, {num_bytes} bytes"
            )
