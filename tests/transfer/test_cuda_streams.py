"""Order on a device's streams, and which device: with a torch.cuda that runs nothing before it must."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from hiradix.adapters.sglang.cache_factory import streams_for
from hiradix.adapters.sglang.engine_views import ControllerView, FencedStreams
from hiradix.memory.dma_transport import device_of
from hiradix.memory.prove import own_stream, settle
from hiradix.transfer import JobKind, LayerDoneCounter
from hiradix.transfer.streams import CudaStreams, Streams, make_streams
from tests.transfer.fake_cuda import FakeCuda

WRITE, LOAD = JobKind.WRITE, JobKind.LOAD


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Rank 3 of a tensor parallel engine: its scheduler's thread is on device 3."""
    fake = FakeCuda()
    monkeypatch.setattr(torch, "cuda", fake)
    fake.set_device(3)
    return fake


def in_a_thread(work: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("device", ["cuda", "cuda:3"])
@pytest.mark.parametrize("make", [CudaStreams, FencedStreams])
def test_workers_copy_on_the_ranks_device_and_touch_no_other(
    make: Callable[[object], CudaStreams], device: str, cuda: FakeCuda
) -> None:
    """Found: `cuda` was device 0 in a worker's thread, on which every rank then made a context."""
    streams = make(torch.device(device))
    after = streams.mark()

    def work() -> None:
        assert cuda.current_device() == 0
        for kind in (WRITE, LOAD):
            with streams.copying(kind, after):
                assert cuda.current_device() == cuda.current_stream().device == 3
                assert cuda.current_stream().cuda_stream != 0, "batched copies take no default stream"
                streams.record(kind)
            streams.drain(kind)
        assert cuda.current_device() == 0 and cuda.used == {3}

    in_a_thread(work)


def test_each_direction_has_a_stream(cuda: FakeCuda) -> None:
    streams, seen = CudaStreams("cuda"), []
    for kind in (WRITE, LOAD):
        with streams.copying(kind, None):
            seen.append(cuda.current_stream())
    assert seen[0] is not seen[1] and cuda.current_stream() not in seen


@pytest.mark.parametrize("kind", [WRITE, LOAD])
def test_a_copy_comes_after_what_was_computed_before_it_was_ordered(kind: JobKind, cuda: FakeCuda) -> None:
    streams, done = CudaStreams("cuda"), list[str]()
    cuda.current_stream().launch(lambda: done.append("forward"))
    after = streams.mark()
    cuda.current_stream().launch(lambda: done.append("next forward"))

    def work() -> None:
        with streams.copying(kind, after):
            cuda.current_stream().launch(lambda: done.append("copy"))
        assert done == []
        streams.drain(kind)

    in_a_thread(work)
    assert done == ["forward", "copy"], "behind the forward, and not behind the next one"


def test_a_forward_waits_for_its_layers_copy_alone(cuda: FakeCuda) -> None:
    streams, done = CudaStreams("cuda"), list[str]()
    gate = LayerDoneCounter(2, timeout_s=0.0, wait_event=streams.wait_event)
    index, after = gate.update_producer(), streams.mark()

    def work() -> None:
        for layer in range(2):
            with streams.copying(LOAD, after):
                cuda.current_stream().launch(lambda layer=layer: done.append(f"load {layer}"))
                event = streams.record(LOAD)
            gate.layer_done(index, layer, event)

    in_a_thread(work)
    gate.set_consumer(index)
    gate.wait_until(0)
    cuda.current_stream().launch(lambda: done.append("read 0"))
    assert done == []
    cuda.current_stream().run()
    assert done == ["load 0", "read 0"]


def test_copies_wait_for_the_forward_stream_of_sglang(cuda: FakeCuda) -> None:
    """Overlapped scheduling: the forward runs on a stream of its own, ahead of the scheduler's."""
    streams, forward, done = FencedStreams("cuda"), cuda.Stream(), list[str]()
    controller = ControllerView(LayerDoneCounter(1), streams)
    controller.load_fence_stream = controller.write_fence_stream = forward
    forward.launch(lambda: done.append("forward"))
    for kind in (WRITE, LOAD):
        with streams.copying(kind, streams.mark()):
            cuda.current_stream().launch(lambda kind=kind: done.append(kind.value))
        streams.drain(kind)
    assert done == ["forward", "write", "load"]


def test_an_older_sglang_sets_no_fence_and_gets_one(cuda: FakeCuda) -> None:
    """Found: 0.5.15 runs its forward ahead too, and its scheduler never says on which stream."""
    forward = cuda.Stream()
    runner = SimpleNamespace(forward_stream=forward)
    streams = streams_for(torch.device("cuda"), SimpleNamespace(model_runner=runner))
    assert streams is not None and streams.fence is forward
    assert streams_for(torch.device("cuda"), SimpleNamespace()) is not None
    assert streams_for(torch.device("cpu"), SimpleNamespace()) is None


def test_pieces_go_to_the_stream_of_the_pools_device(cuda: FakeCuda) -> None:
    """Found: called from a thread on another device, the engines were given that one's stream."""
    cuda.set_device(0)
    host, pool = SimpleNamespace(device=torch.device("cpu")), SimpleNamespace(device=torch.device("cuda", 3))
    for pair in ((host, pool), (pool, host)):
        with device_of(*pair):  # type: ignore[arg-type]
            assert cuda.current_stream().device == 3
        assert cuda.current_device() == 0
    with device_of(host, host):  # type: ignore[arg-type]
        assert cuda.current_device() == 0


def test_what_is_tried_at_start_comes_after_all_that_is_under_way(cuda: FakeCuda) -> None:
    """The zeros of a pool just made are still being written, on the default stream."""
    device, done = torch.device("cuda", 3), list[str]()
    cuda.current_stream().launch(lambda: done.append("zeros"))
    cuda.Stream().launch(lambda: done.append("another stream"))
    with own_stream(device):
        assert done == ["zeros", "another stream"]
        assert cuda.current_stream().cuda_stream != 0, "batched copies take no default stream"
        cuda.current_stream().launch(lambda: done.append("copy"))
        assert len(done) == 2
        settle(device)
        assert done[2:] == ["copy"]
    assert cuda.current_stream().cuda_stream == 0


def test_the_pool_decides(cuda: FakeCuda) -> None:
    assert type(make_streams("cpu")) is Streams
    assert isinstance(make_streams(torch.device("cuda", 1)), CudaStreams)
