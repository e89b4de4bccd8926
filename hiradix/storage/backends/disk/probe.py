"""Probe: which kinds of I/O work in this directory on this kernel, found out by trying."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hiradix.errors import ConfigError, StorageError
from hiradix.os_memory import address_of, staging_memory
from hiradix.storage.backends.disk import kernel
from hiradix.storage.backends.disk.config import DiskConfig
from hiradix.storage.backends.disk.engines import IOEngine, Operation, ThreadEngine, UringEngine
from hiradix.storage.backends.disk.log import NAME as LOG_NAME
from hiradix.storage.backends.disk.moves import ALIGNMENT, PageIO
from hiradix.storage.backends.disk.segments import SUFFIX
from hiradix.storage.kit.options import flag
from hiradix.storage.kit.vectored import NO_ROOM

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Abilities:
    """The kinds of I/O that work. engine: `io_uring` or `threads`. direct: O_DIRECT. cachestat: the kernel says
    what is in its page cache."""

    io: PageIO
    engine: str
    direct: bool
    cachestat: bool


def choose(config: DiskConfig, read_only: bool = False) -> Abilities:
    """The fastest kind of I/O that works in `config.path`, or the configured one.

    read_only: no file can be created there. Raises ConfigError if the configured kind does not work, OSError if
    none does.
    """
    with _probe(config.path, read_only) as path:
        engine = _engine(config, path)
        direct = config.direct is not False and _direct_works(engine, path)
        cachestat = _has_cachestat(path)
    if config.direct and not direct:
        engine.close()
        raise ConfigError(f"{flag('direct_io')} on: {config.path} does not take O_DIRECT")
    use_cache = direct and cachestat and config.use_cache
    io = PageIO(engine, use_cache, config.direct_writes and direct)
    return Abilities(io, engine.name, direct, cachestat)


@contextmanager
def _probe(folder: Path, read_only: bool) -> Iterator[Path]:
    """A file to try reads on: a new one, or an existing segment where none can be created."""
    if read_only:
        found = next(iter(sorted(folder.glob(f"segment-*{SUFFIX}"))), folder / LOG_NAME)
        if not found.exists():
            raise StorageError("there is no store in it, and none can be made")
        yield found
        return
    path = folder / f"probe-{os.getpid()}-{os.urandom(4).hex()}"
    try:
        try:
            with open(path, "xb") as file:
                file.write(bytes(ALIGNMENT))
            found = path
        except OSError as error:
            segments = sorted(folder.glob(f"segment-*{SUFFIX}"))
            if error.errno not in NO_ROOM or not segments:
                raise
            found = segments[0]
        yield found
    finally:
        path.unlink(missing_ok=True)


def _engine(config: DiskConfig, path: Path) -> IOEngine:
    if config.engine != "threads":
        try:
            engine = UringEngine()
            if _reads(engine, path, os.O_RDONLY):
                return engine
            engine.close()
            raise OSError("its reads fail")
        except (OSError, ValueError) as error:
            if config.engine == "io_uring":
                raise ConfigError(f"{flag('io_engine')} io_uring: {error}") from error
            logger.info("disk storage: io_uring is not available (%s), using threads", error)
    return ThreadEngine(config.num_threads)


def _direct_works(engine: IOEngine, path: Path) -> bool:
    try:
        return _reads(engine, path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return False


def _reads(engine: IOEngine, path: Path, flags: int) -> bool:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        memory = staging_memory(ALIGNMENT)
        spans = [(address_of(memory), ALIGNMENT)]
        ((_, results),) = engine.run([Operation(fd, 0, [memory], spans)], False, 1)
        return results == [min(ALIGNMENT, kernel.file_size(fd))]
    finally:
        os.close(fd)


def _has_cachestat(path: Path) -> bool:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return kernel.has_cachestat(fd)
    finally:
        os.close(fd)
