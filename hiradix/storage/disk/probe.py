"""What this directory and this kernel can do, found out by trying."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from hiradix.errors import ConfigError
from hiradix.os_memory import address_of, staging_memory
from hiradix.storage.disk import kernel
from hiradix.storage.disk.config import DiskConfig
from hiradix.storage.disk.engines import Engine, Operation, ThreadEngine, UringEngine
from hiradix.storage.disk.moves import ALIGNMENT, PageIO
from hiradix.storage.options import flag

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Abilities:
    """What was chosen. direct: O_DIRECT; cachestat: the page cache can be asked what it has."""

    io: PageIO
    engine: str
    direct: bool
    cachestat: bool


def choose(config: DiskConfig) -> Abilities:
    """The fastest way that works in `config.path`, or the one that was asked for.

    Raises ConfigError when what was asked for is not possible, OSError when nothing is.
    """
    path = config.path / f"probe-{os.getpid()}-{os.urandom(4).hex()}"
    try:
        with open(path, "xb") as file:
            file.write(bytes(2 * ALIGNMENT))
        engine = _engine(config, path)
        direct = config.direct is not False and _direct_works(engine, path)
        cachestat = _asked(path)
    finally:
        path.unlink(missing_ok=True)
    if config.direct and not direct:
        engine.close()
        raise ConfigError(f"{flag('direct_io')} on: {config.path} does not take O_DIRECT")
    use_cache = direct and cachestat and config.use_cache
    io = PageIO(engine, use_cache, config.direct_writes and direct)
    return Abilities(io, engine.name, direct, cachestat)


def _engine(config: DiskConfig, path: Path) -> Engine:
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


def _direct_works(engine: Engine, path: Path) -> bool:
    try:
        return _reads(engine, path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return False


def _reads(engine: Engine, path: Path, flags: int) -> bool:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        memory = staging_memory(ALIGNMENT)
        spans = [(address_of(memory), ALIGNMENT)]
        ((_, results),) = engine.run([Operation(fd, ALIGNMENT, [memory], spans)], False, 1)
        return results == [ALIGNMENT]
    finally:
        os.close(fd)


def _asked(path: Path) -> bool:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return kernel.has_cachestat(fd)
    finally:
        os.close(fd)
