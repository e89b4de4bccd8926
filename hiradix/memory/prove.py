"""Whether a transport copies byte for byte between two pools, asked at start, before they hold anything.

What a machine lacks (a compiler for the kernel's launcher, a newer driver, memory for a staging buffer) shows
here, where another transport can still be taken, and not as transfers that all fail while serving. It is also
what compiles kernels, so that no request waits for that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from hiradix.memory.pools import HostPool, Pool
from hiradix.memory.transport import PageIds, TorchTransport, Transport

_MAX_PAGES = 3
_Pages = tuple[PageIds, PageIds]  # of the device and of the host


def fault_of(transport: Transport, device: Pool, host: HostPool) -> str | None:
    """The fault of its copies between the pools, in words; None if all bytes arrive, both ways.

    Overwrites pages of both, with zeros at last. Compared with the torch transport, a few pages, loads layer
    by layer and writes at once, as they are used.
    """
    num_pages = min(_MAX_PAGES, device.page_limit - 1, host.page_limit)
    pages = np.arange(num_pages, 0, -1), np.arange(num_pages)
    with own_stream(device.device):
        try:
            fault = _fault(transport, device, host, pages)
        except Exception as error:  # whatever compilers, drivers and other people's kernels raise
            settle(device.device)  # raises, and ends the start, where nothing works after that error
            fault = f"{type(error).__name__}: {error}"
        _clear(host, pages[1])
        _load(TorchTransport(), device, host, pages)
    return fault


def _fault(transport: Transport, device: Pool, host: HostPool, pages: _Pages) -> str | None:
    reference, fault = TorchTransport(), None
    for what, loads, writes in (("loads", transport, reference), ("writes", reference, transport)):
        want = _fill(host, pages[1])
        _load(loads, device, host, pages)
        _clear(host, pages[1])
        writes.copy_pages(device, host, *pages, None)
        settle(device.device)
        if _bytes(host, pages[1]) != want:
            fault = f"it {what} other bytes than torch"
    return fault


def _load(transport: Transport, device: Pool, host: HostPool, pages: _Pages) -> None:
    """Layer by layer, to its end."""
    for layer in range(device.shape.num_layers):
        transport.copy_pages(host, device, pages[1], pages[0], range(layer, layer + 1))
    settle(device.device)


def _fill(host: HostPool, pages: PageIds) -> bytes:
    """Random bytes into the pages; what they are."""
    random = np.random.default_rng(0)
    for page in pages.tolist():
        for view in host.page_views(page):
            view[:] = random.bytes(len(view))
    return _bytes(host, pages)


def _clear(host: HostPool, pages: PageIds) -> None:
    for page in pages.tolist():
        for view in host.page_views(page):
            view[:] = bytes(len(view))


def _bytes(host: HostPool, pages: PageIds) -> bytes:
    return b"".join(bytes(view) for page in pages.tolist() for view in host.page_views(page))


def settle(device: torch.device) -> None:
    """Return when the copies given to the current stream of a CUDA device have ended."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """A stream of its own, since batched copies do not take the default one, with nothing else under way."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        yield
