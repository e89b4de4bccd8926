"""Peers of the storage benchmark that read and write past the page cache: each with its best options.

`lmcache-direct`: LMCache's disk backend with `use_odirect`. `nixl`: NIXL's own library, called alone, without
names, seals or checks: its POSIX plugin with io_uring where that is to be had, one file whose blocks are
there, a batch of pages in one transfer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from systems import BATCH, SYSTEMS, LMCacheDisk, System

ENGINES = ("use_uring", "use_aio", "use_posix_aio")  # the fastest first; the library may lack some
WAIT_S = 120.0


class LMCacheDirect(LMCacheDisk):
    """LMCache 0.5.6's LocalDiskBackend with O_DIRECT."""

    def _open(self) -> None:
        self.options = self.options | {"use_odirect": True}
        super()._open()
        assert self.store.use_odirect, "LMCache took no notice of use_odirect"


class Nixl(System):
    """NIXL's POSIX plugin between the pool and one file."""

    def _open(self) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        fault: Exception | None = None
        for engine in ENGINES:
            try:
                self.agent = nixl_agent(f"bench-{os.getpid()}", nixl_agent_config(backends=[]))
                self.agent.create_backend("POSIX", {engine: "true"})
                break
            except Exception as error:  # the library's have no common base
                fault = error
        else:
            raise RuntimeError(f"NIXL's POSIX plugin cannot be used: {fault}")
        self.path, pool = self.folder / "pages", self.pool
        self.fd = os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_DIRECT)
        os.posix_fallocate(self.fd, 0, pool.num_bytes)
        self.begin = int(pool.cells.ctypes.data)
        self.memory = self.agent.register_memory([(self.begin, pool.num_bytes, 0, "")], "DRAM")
        self.place = self.agent.register_memory([(0, pool.num_bytes, self.fd, "")], "FILE")

    def _move(self, what: str, indices: Sequence[int]) -> None:
        size, agent = self.pool.page_bytes, self.agent
        near = agent.get_xfer_descs([(self.begin + i * size, size, 0) for i in indices], "DRAM")
        far = agent.get_xfer_descs([(i * size, size, self.fd) for i in indices], "FILE")
        handle = agent.initialize_xfer(what, near, far, agent.name)
        state, until = agent.transfer(handle), time.monotonic() + WAIT_S
        while state == "PROC" and time.monotonic() < until:
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        assert state == "DONE", state

    def _put(self, indices: Sequence[int]) -> None:
        self._move("WRITE", indices)

    def _get(self, indices: Sequence[int]) -> None:
        self._move("READ", indices)

    def exists(self) -> None:
        answers = self.agent.query_memory([(0, 0, 0, str(self.path))] * BATCH, "POSIX", mem_type="FILE")
        assert all(answer is not None for answer in answers)

    def files(self) -> list[Path]:
        return [self.path]

    def clear(self) -> None:
        """Its pages are written over."""

    def close(self) -> None:
        self.agent.deregister_memory(self.place)
        self.agent.deregister_memory(self.memory)
        os.close(self.fd)
        del self.agent


ALL: dict[str, Any] = {**SYSTEMS, "lmcache-direct": LMCacheDirect, "nixl": Nixl}
