"""Pinning and the runtime itself."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
import torch

from hiradix.errors import CacheError
from hiradix.memory import HostPool, KVShape
from hiradix.memory.cuda_runtime import find_runtime
from hiradix.memory.dma_transport import CudaPieces, Pieces
from hiradix.memory.host_memory import pin_chunks
from hiradix.transfer import JobKind
from hiradix.transfer.streams import CudaStreams

SHAPE = KVShape(2, 4, 16, 16, torch.bfloat16)


def test_the_runtime_is_torchs_own(cuda: torch.device) -> None:
    runtime = find_runtime()
    assert runtime is not None, "libcudart was not found beside torch"
    assert runtime.reads_host_addresses(cuda.index)


def test_pinned_memory_is_given_back(cuda: torch.device) -> None:
    pool = HostPool(SHAPE, 64, 16, device=cuda)
    assert pool.buffer.is_pinned() and pool.reachable
    address, runtime = pool.buffer.data_ptr(), find_runtime()
    assert runtime is not None and runtime.cudaHostRegister(address, 4096, 0) != 0, "registered twice"
    del pool
    gc.collect()
    assert runtime.cudaHostUnregister(address) != 0, "still registered"


def test_a_refused_registration_does_not_meet_the_next_launch(cuda: torch.device) -> None:
    """torch checks each launch of its own for an error: it must not find one that was dealt with."""
    pool, runtime = HostPool(SHAPE, 64, 16, device=cuda), find_runtime()
    assert runtime is not None
    with pytest.raises(CacheError, match="cudaHostRegister"):
        pin_chunks(runtime, pool.buffer.data_ptr(), 4096, 4096)
    assert runtime.cudaHostUnregister(1 << 12) != 0, "nothing is registered there"
    assert (torch.ones(1000, device=cuda) + 1).sum().item() == 2000


def test_what_was_had_is_said(cuda: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "hiradix.memory.pools"):
        HostPool(SHAPE, 64, 16, device=cuda)
    assert "pinned" in caplog.text and "not pinned" not in caplog.text


def test_another_threads_first_call_is_on_the_right_device(cuda: torch.device) -> None:
    """A copy by a worker's thread, whose current device was never set."""
    runtime, streams = find_runtime(), CudaStreams("cuda")
    assert runtime is not None
    source = torch.arange(64, dtype=torch.uint8, device=cuda)
    target = torch.zeros(64, dtype=torch.uint8).pin_memory()
    after, errors = streams.mark(), list[BaseException]()

    def work() -> None:
        try:
            with streams.copying(JobKind.WRITE, after):
                ends = [np.array([tensor.data_ptr(), tensor.data_ptr() + 32]) for tensor in (target, source)]
                CudaPieces(runtime)(Pieces(ends[0], ends[1], np.array([32, 32])))
            streams.drain(JobKind.WRITE)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert not errors and target.tolist() == list(range(64))
