"""Copies beside computing: what waits for what on the device, under a real clock and inside CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from hiradix.memory import KVShape, make_transport
from hiradix.transfer import HiCacheController
from tests.gpu.pools import Pair, make_pair, settle

LAYERS, NUM_PAGES, PAGE_SIZE = 4, 64, 16
SHAPE = KVShape(LAYERS, 8, 128, 128, torch.float32)
PAGES = np.arange(1, NUM_PAGES + 1)
ROUNDS = 5


def keep_busy(device: torch.device) -> None:
    """Some 30 ms of work for the current stream."""
    if device.type == "cuda":
        torch.cuda._sleep(50_000_000)


@pytest.fixture(params=["default stream", "own stream"])
def stream(request: pytest.FixtureRequest, device: torch.device) -> Iterator[None]:
    """What the engine computes on."""
    if device.type == "cpu" or request.param == "default stream":
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream(device)):
        yield


@pytest.fixture
def pair(device: torch.device) -> Pair:
    return make_pair(SHAPE, NUM_PAGES, device, page_size=PAGE_SIZE)


@pytest.fixture(params=["kernel", "direct", "auto"])
def controller(
    request: pytest.FixtureRequest, pair: Pair, device: torch.device, stream: None
) -> Iterator[HiCacheController]:
    transport = make_transport(request.param, device, (pair.device, pair.host))
    made = HiCacheController(pair.device, pair.host, transport=transport)
    yield made
    assert made.close(30.0)


def ended(controller: HiCacheController, ticket: int) -> None:
    """Wait for a ticket's result, which must be all of its pages."""
    assert controller.wait([ticket], 30.0)
    (result,) = controller.poll()
    assert result.error is None and result.num_pages == NUM_PAGES, result


def fill_host(pair: Pair, value: float) -> None:
    pair.host.buffer.view(torch.float32).fill_(value)


def test_a_write_waits_for_what_was_computed(
    pair: Pair, controller: HiCacheController, device: torch.device
) -> None:
    for value in range(1, ROUNDS):
        keep_busy(device)
        for buffer in (*pair.device.k_buffer, *pair.device.v_buffer):
            buffer.fill_(value)
        ended(controller, controller.write(PAGES, PAGES - 1))
        assert bool((pair.host.buffer.view(torch.float32) == value).all())


def test_a_load_waits_for_what_was_computed_and_readers_for_the_load(
    pair: Pair, controller: HiCacheController, device: torch.device
) -> None:
    """Pages are read, zeroed, loaded and read again, all of it launched at once."""
    gate = controller.layer_done_counter
    fill_host(pair, 0.0)
    ticket = controller.load(PAGES - 1, PAGES)
    controller.start_loading()
    ended(controller, ticket)
    for value in range(1, ROUNDS):
        fill_host(pair, value)
        keep_busy(device)
        before = [pair.device.k_buffer[layer][PAGE_SIZE:].mean() for layer in range(LAYERS)]
        for buffer in (*pair.device.k_buffer, *pair.device.v_buffer):
            buffer.zero_()
        ticket = controller.load(PAGES - 1, PAGES)
        gate.set_consumer(controller.start_loading())
        seen = [pair.device.get_key_buffer(layer)[PAGE_SIZE:].mean() for layer in range(LAYERS)]
        seen += [pair.device.get_value_buffer(layer)[PAGE_SIZE:].mean() for layer in range(LAYERS)]
        assert [float(mean) for mean in before] == [value - 1] * LAYERS, "overwritten while it was read"
        assert [float(mean) for mean in seen] == [value] * 2 * LAYERS, "read before it was there"
        gate.set_consumer(-1)
        ended(controller, ticket)


def test_both_directions_at_once(pair: Pair, controller: HiCacheController, device: torch.device) -> None:
    """Half the pages go down while the other half come up."""
    half = NUM_PAGES // 2
    want = pair.twin.k_buffer[1][PAGE_SIZE : PAGE_SIZE * (1 + half)].clone()
    fill_host(pair, 3.0)
    for own, other in zip(pair.device.k_buffer, pair.twin.k_buffer, strict=True):
        own.copy_(other)
    write = controller.write(PAGES[:half], PAGES[:half] - 1)
    load = controller.load(PAGES[half:] - 1, PAGES[half:])
    controller.start_loading()
    assert controller.wait([write, load], 30.0)
    assert [result.num_pages for result in controller.poll()] == [half, half]
    assert bool((pair.device.k_buffer[1][PAGE_SIZE * (1 + half) :] == 3.0).all())
    host = pair.host.layer_views(0)[1][:half].reshape(want.shape)
    assert torch.equal(host.view(torch.int32), want.view(torch.int32))


def test_a_graph_is_replayed_behind_the_load(pair: Pair, cuda: torch.device) -> None:
    """Captured while nothing loads; its layers do not ask, so who replays it waits for the last layer."""
    transport = make_transport("kernel", cuda, (pair.device, pair.host))
    controller = HiCacheController(pair.device, pair.host, transport=transport)
    gate, out = controller.layer_done_counter, torch.zeros(LAYERS, device=cuda)

    def read() -> None:
        for layer in range(LAYERS):
            out[layer] = pair.device.get_key_buffer(layer)[PAGE_SIZE:].mean()

    read()  # loads its kernels, which a capture may not
    settle(cuda)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        read()
    for value in (5.0, 6.0):
        fill_host(pair, value)
        ticket = controller.load(PAGES - 1, PAGES)
        gate.set_consumer(controller.start_loading())
        assert gate.consumer_index >= 0
        gate.wait_until(gate.num_layers - 1)
        graph.replay()
        assert out.tolist() == [value] * LAYERS
        gate.set_consumer(-1)
        ended(controller, ticket)
    assert controller.close(30.0)
