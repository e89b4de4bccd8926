"""The pages in a store, whoever wrote them: for tools. Reading a page needs its name, fingerprint and length."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hiradix.errors import ConfigError, StorageError
from hiradix.storage.backends.file.page_dir import pages_below
from hiradix.storage.fingerprint import PageFingerprint
from hiradix.storage.kit.seal import SEAL_BYTES
from hiradix.storage.opening import backend_keys
from hiradix.storage.protocol import is_key
from hiradix.storage.registry import load_storage_backend
from hiradix.storage.wrappers.wrap import module_of

URL_FORMS = (
    "file:///folder, disk:///folder, redis://host:port/0, rediss://, unix://, s3://bucket/x, gs://, az://"
)
_FINGERPRINT = re.compile(r"[0-9a-f]{32}")
_BATCH = 500


@dataclass(frozen=True)
class StoredPage:
    """One page. fingerprint: 32 hex digits. num_bytes: of the page, without what its backend adds.

    misplaced: where in the store it is, if that is no place where a server looks for this key.
    """

    fingerprint: str
    key: str
    num_bytes: int
    misplaced: str = ""


@dataclass(frozen=True)
class StoreAddress:
    """A backend's name and its keys."""

    backend: str
    config: Mapping[str, Any]

    @staticmethod
    def parse(url: str, settings: Sequence[str] = ()) -> StoreAddress:
        """The address in a URL and `key=value` settings, values being JSON or text. Raises ConfigError."""
        scheme, _, rest = url.partition("://")
        keys: dict[str, Any]
        if scheme in ("file", "disk"):
            keys = {f"{scheme}_storage_path": rest}
            name = scheme
        elif scheme in ("redis", "rediss", "unix"):
            name, keys = "redis", {"url": url}
        elif scheme in ("s3", "gs", "az", "abfs", "abfss"):
            name, keys = "s3", {"url": url}
        else:
            shown = url.partition(":")[0] + ":..." if ":" in url else repr(url)  # it may have a password
            raise ConfigError(f"{shown} is no store; expected one of {URL_FORMS}")
        if not rest:
            raise ConfigError(f"{url!r}: nothing after {scheme}://")
        return StoreAddress(name, keys | dict(_setting(text) for text in settings))


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {text!r}: expected key=value")
    try:
        return key, json.loads(value)
    except (ValueError, RecursionError):
        return key, value


@dataclass(frozen=True)
class StoredFingerprint(PageFingerprint):
    """Stands for the fingerprint whose first 32 hex digits a store shows; all that backends use of it."""

    known: str = ""

    def digest(self) -> str:
        return self.known + "0" * 32


def stored_fingerprint(known: str) -> StoredFingerprint:
    """Raises ConfigError unless `known` is 32 hex digits."""
    if _FINGERPRINT.fullmatch(known) is None:
        raise ConfigError(f"{known!r} is no fingerprint: expected 32 hex digits, as `storage stat` shows")
    return StoredFingerprint("stored", known=known)


def scan(address: StoreAddress) -> Iterator[StoredPage]:
    """Every page in the store, in no order. Raises ConfigError where a backend cannot list."""
    scanner = _SCANNERS.get(address.backend)
    if scanner is None or address.config.get("naming") == "sglang":
        raise ConfigError(f"the {address.backend} store cannot list its pages: only bench works on it")
    load_storage_backend(address.backend)  # says what to install
    extra = 0
    if address.config.get("encryption_key_file"):
        extra = module_of("encryption_key_file").OVERHEAD_BYTES
        if address.backend not in ("file", "disk"):
            extra -= SEAL_BYTES  # encrypted pages have no seal beside them
    for page in scanner(address.config):
        if not is_key(page.key):
            continue  # somebody else's
        yield dataclasses.replace(page, num_bytes=page.num_bytes - extra)


def _scan_files(config: Mapping[str, Any]) -> Iterator[StoredPage]:
    root = Path(str(config["file_storage_path"])).expanduser()
    if not root.is_dir():
        raise ConfigError(f"{root} is no folder")
    is_empty = True
    for fingerprint, key, num_bytes, misplaced in pages_below(str(root)):
        is_empty = False
        yield StoredPage(fingerprint, key, num_bytes - SEAL_BYTES, misplaced)
    if is_empty and _is_disk(root):
        raise ConfigError(f"{root} is a disk store, not a file store: disk://{root}")
    if is_empty and not (root / "writers").exists() and any(root.glob("*.bin")):
        raise ConfigError(f"{root} is no file store: its .bin files look like those of SGLang")


def _is_disk(root: Path) -> bool:
    """Whether the log of a disk store is in the folder."""
    from hiradix.storage.backends.disk.log import pages_in

    try:
        pages_in(root)
    except (OSError, StorageError):
        return False
    return True


def _scan_disk(config: Mapping[str, Any]) -> Iterator[StoredPage]:
    """The pages in the log, read without its lock; keys that are no page hashes are left out."""
    from hiradix.storage.backends.disk.log import pages_in

    root = Path(str(config["disk_storage_path"])).expanduser()
    try:
        entries = pages_in(root)
    except (OSError, StorageError) as error:
        raise ConfigError(f"{root} is no disk store: {error}") from error
    for entry in entries:
        if isinstance(entry.name, str):
            yield StoredPage(entry.namespace.hex(), entry.name, entry.num_bytes)


def _scan_redis(config: Mapping[str, Any]) -> Iterator[StoredPage]:
    from hiradix.storage.backends.redis.config import RedisConfig
    from hiradix.storage.backends.redis.link import connect

    options = RedisConfig.from_mapping(backend_keys(config))
    client = connect(options)
    names: list[bytes] = []
    try:
        for name in client.scan_iter(f"{options.key_prefix}:*", count=_BATCH):
            names.append(name)
            if len(names) >= _BATCH:
                yield from _redis_pages(client, options.key_prefix, names)
                names = []
        yield from _redis_pages(client, options.key_prefix, names)
    finally:
        client.close()


def _redis_pages(client: Any, prefix: str, names: Sequence[bytes]) -> Iterator[StoredPage]:
    pipeline = client.pipeline(transaction=False)
    for name in names:
        pipeline.strlen(name)
    for name, length in zip(names, pipeline.execute(raise_on_error=False)):
        parts = name.decode("utf-8", "replace").rsplit(":", 2)
        if len(parts) < 3 or parts[0] != prefix:
            continue  # of a store whose prefix begins with ours
        if _FINGERPRINT.fullmatch(parts[1]) and isinstance(length, int):
            yield StoredPage(parts[1], parts[2], length - SEAL_BYTES)


def _scan_objects(config: Mapping[str, Any]) -> Iterator[StoredPage]:
    import obstore

    from hiradix.storage.backends.s3.client import connect
    from hiradix.storage.backends.s3.config import S3Config

    for part in obstore.list(connect(S3Config.from_mapping(backend_keys(config)))):
        for entry in part:
            fingerprint, _, key = str(entry["path"]).rpartition("/")
            if _FINGERPRINT.fullmatch(fingerprint):  # deeper ones are of stores below this one
                yield StoredPage(fingerprint, key, int(entry["size"]) - SEAL_BYTES)


_SCANNERS: dict[str, Callable[[Mapping[str, Any]], Iterator[StoredPage]]] = {
    "file": _scan_files,
    "disk": _scan_disk,
    "redis": _scan_redis,
    "s3": _scan_objects,
}
