"""The `nixl` backend: the page files of `file`, or the objects of `s3`, moved by NIXL's plugins.

NIXL moves bytes and knows neither names nor room, so both come from those backends, whose stores it shares:
either reads what the other wrote. What a transfer of NIXL's fails to move is moved the other backend's way,
which says of each page what is wrong with it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from hiradix.errors import ConfigError, StorageError
from hiradix.storage.backends.file.backend import FileBackend, FileRead, FileWrite
from hiradix.storage.backends.nixl.config import FILE_PLUGINS, NixlConfig
from hiradix.storage.backends.nixl.link import NixlLink, Transfer
from hiradix.storage.backends.s3.backend import S3Backend
from hiradix.storage.kit.options import flag
from hiradix.storage.kit.registered import LaidOut, Span
from hiradix.storage.kit.seal import SEAL_BYTES
from hiradix.storage.protocol import Page, StorageBackend, StorageContext, Traits, fits


class NixlBackend(StorageBackend):
    """`nixl`: makes the backend of the asked `plugin`."""

    def __new__(cls, context: StorageContext) -> StorageBackend:  # type: ignore[misc]
        config = NixlConfig.from_mapping(context.extra_config)
        inside = dataclasses.replace(context, extra_config=config.rest)
        made = NixlFiles if config.plugin in FILE_PLUGINS else NixlObjects
        return made(inside, config)


class NixlFiles(FileBackend):
    """Page files through POSIX, GDS or GDS_MT."""

    def __init__(self, context: StorageContext, nixl: NixlConfig):
        self._link = NixlLink(nixl, {})
        try:
            super().__init__(context)
        except BaseException:
            self._link.close()
            raise
        self.traits = Traits(verifies=True, namespaced=True, direct=nixl.zero_copy)

    def register(self, memory: memoryview) -> None:
        self._check(())
        self._link.memory.add(memory)

    def close(self) -> None:
        super().close()
        self._link.close()

    def _read(self, reads: Sequence[FileRead]) -> None:
        todo = [read for read in reads if read.verdict is None]
        done = 0
        for part in self._link.memory.lay_out([read.key for read in todo], [read.page for read in todo]):
            group = todo[done : done + len(part)]
            done += len(part)
            moved = self._moved(False, part, [read.fd for read in group])
            for index in itertools.compress(range(len(group)), moved):
                group[index].verdict = part.check(index, self._sealer)
            super()._read(group)

    def _write(self, writes: Sequence[FileWrite]) -> None:
        done = 0
        for part in self._link.memory.lay_out([w.key for w in writes], [w.page for w in writes]):
            group = writes[done : done + len(part)]
            done += len(part)
            part.gather()
            part.seal(self._sealer)
            moved = self._moved(True, part, [write.fd for write in group])
            for file, good in zip(group, moved):
                file.is_filled = good
            super()._write([file for file in group if not file.is_filled])

    def _moved(self, write: bool, part: LaidOut, fds: Sequence[int]) -> list[bool]:
        transfers = [
            Transfer(fd, num_bytes, seal_first(spans))
            for fd, num_bytes, spans in zip(fds, part.num_bytes, part.spans, strict=True)
        ]
        self._count("pages_copied", part.num_copied)
        self._count("pages_in_place", len(part) - part.num_copied)
        moved = self._link.run(write, transfers)
        if not all(moved):
            self._count("transfer_errors")
        return moved


class NixlObjects(S3Backend):
    """Objects through the plugin OBJ."""

    def __init__(self, context: StorageContext, nixl: NixlConfig):
        if nixl.zero_copy:
            raise ConfigError(f"{flag('zero_copy')}: not with plugin OBJ, whose calls wait for a network")
        url = urlsplit(str(context.extra_config.get("url", "")))
        if url.scheme != "s3":
            raise ConfigError(f"{flag('url')}: plugin OBJ needs s3://bucket/prefix, got {url.geturl()!r}")
        super().__init__(context)
        self.traits = dataclasses.replace(self.traits, in_place=False)
        self._numbers = itertools.count(1)
        self._root = "".join(f"{part}/" for part in (url.path.strip("/"), self._folder) if part)
        try:
            self._link = NixlLink(nixl, _parameters(url.netloc, self.config.settings))
        except ConfigError:
            self.close()
            raise

    def register(self, memory: memoryview) -> None:
        self._check(())
        self._link.memory.add(memory)

    def _read_all(self, items: Sequence[tuple[str, Page]]) -> list[bool]:
        sizes = self._sizes([key for key, _ in items])
        whole = [fits(size or 0, page, False) for size, (_, page) in zip(sizes, items)]
        found = [item for item, there in zip(items, whole) if there]
        moved = iter(self._moved(False, found))
        return [there and next(moved) for there in whole]

    def _write_all(self, items: Sequence[tuple[str, Page]]) -> list[bool]:
        return self._moved(True, items)

    def _moved(self, write: bool, items: Sequence[tuple[str, Page]]) -> list[bool]:
        ok: list[bool] = []
        keys, pages = [key for key, _ in items], [page for _, page in items]
        for part in self._link.memory.lay_out(keys, pages, 0):
            group = items[len(ok) : len(ok) + len(part)]
            if write:
                part.gather()
            moved = self._link.run(write, self._transfers(part))
            for index in () if write else itertools.compress(range(len(part)), moved):
                part.scatter(index)
            failed = [index for index, good in enumerate(moved) if not good]
            for index, good in zip(failed, self._moved_plainly(write, group, failed)):
                moved[index] = good
            ok += moved
        return ok

    def _moved_plainly(self, write: bool, group: Sequence[tuple[str, Page]], failed: list[int]) -> list[bool]:
        """Move by plain requests the pages that NIXL failed to move. StorageError only where NIXL failed with
        the whole group, as in `s3`."""
        items = [group[index] for index in failed]
        if items:
            with self._lock:
                self._counts["transfer_errors"] += len(items)
        try:
            return super()._write_all(items) if write else super()._read_all(items)
        except StorageError:
            if len(items) == len(group):
                raise
            return [False] * len(items)

    def _transfers(self, part: LaidOut) -> list[Transfer]:
        return [
            Transfer(next(self._numbers), num_bytes, in_order(spans), self._root + key)
            for key, num_bytes, spans in zip(part.keys, part.num_bytes, part.spans, strict=True)
        ]


def seal_first(spans: Sequence[Span]) -> list[tuple[int, int, int]]:
    """Pieces of a page file: the seal, which is the last span, is at its beginning."""
    return [(0, *spans[-1]), *in_order(spans[:-1], SEAL_BYTES)]


def in_order(spans: Sequence[Span], offset: int = 0) -> list[tuple[int, int, int]]:
    """Pieces that follow each other from `offset`."""
    ends = itertools.accumulate((length for _, length in spans), initial=offset)
    return [(start, *span) for start, span in zip(ends, spans)]


def _parameters(bucket: str, settings: Mapping[str, object]) -> dict[str, str]:
    """The plugin's parameters, from the names that `s3` has for them. No checksums that S3 does not demand:
    other servers take an upload with one for damaged."""
    names = {
        "endpoint": "endpoint_override", "region": "region", "access_key_id": "access_key",
        "secret_access_key": "secret_key", "session_token": "session_token",
    }  # fmt: skip
    found = {theirs: str(settings[ours]) for ours, theirs in names.items() if ours in settings}
    if str(settings.get("endpoint", "")).startswith("http://"):
        found |= {"scheme": "http", "use_virtual_addressing": "false"}
    return found | {"bucket": bucket, "req_checksum": "required"}
