"""What does not copy byte for byte at start is not used: another transport is, and the log says why."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from hiradix.memory import LAYOUTS, TorchTransport, choose, prove
from hiradix.memory.calibrate import CalibratedTransport
from hiradix.memory.dma_transport import DmaTransport, memmove_pieces
from hiradix.memory.packing_transport import PackingTransport
from hiradix.memory.pools import HostPool, Pool
from hiradix.memory.prove import fault_of
from hiradix.memory.transport import PageIds
from tests.memory.pool_cases import SHAPES, contents, device_pool, host_pool

Fault = Callable[["Faulty", Pool, Pool, PageIds, PageIds], tuple[PageIds, PageIds]]


class Faulty(TorchTransport):
    """A transport with a fault in what it copies where; it has no `copy_pages` of its own without one."""

    def __init__(self, name: str = "faulty", fault: Fault | None = None) -> None:
        super().__init__()
        self.name = name
        self._fault = fault
        self.copies: list[tuple[bool, range | None]] = []

    def copy_pages(
        self, src: Pool, dst: Pool, src_pages: PageIds, dst_pages: PageIds, layers: range | None = None, /
    ) -> None:
        self.copies.append((isinstance(dst, HostPool), layers))
        if self._fault is not None:
            src_pages, dst_pages = self._fault(self, src, dst, src_pages, dst_pages)
        super().copy_pages(src, dst, src_pages, dst_pages, layers)


def raises(own: Faulty, src: Pool, dst: Pool, froms: PageIds, intos: PageIds) -> tuple[PageIds, PageIds]:
    raise RuntimeError("Failed to find C compiler")


def loses_a_page(
    own: Faulty, src: Pool, dst: Pool, froms: PageIds, intos: PageIds
) -> tuple[PageIds, PageIds]:
    return froms[:-1], intos[:-1]


def in_another_order(
    own: Faulty, src: Pool, dst: Pool, froms: PageIds, intos: PageIds
) -> tuple[PageIds, PageIds]:
    """Both ways alike: there and back with it alone, all bytes would be where they were."""
    return (froms[::-1], intos) if isinstance(dst, HostPool) else (froms, intos[::-1])


def writes_nothing(
    own: Faulty, src: Pool, dst: Pool, froms: PageIds, intos: PageIds
) -> tuple[PageIds, PageIds]:
    return (froms[:0], intos[:0]) if isinstance(dst, HostPool) else (froms, intos)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SHAPES)
def test_what_copies_right_is_sound_and_leaves_zeros(layout: str, name: str) -> None:
    device, host = device_pool(SHAPES[name], 5, 1), host_pool(SHAPES[name], 4, layout, 2)
    engines = DmaTransport(memmove_pieces)
    before = contents(device)
    for transport in (TorchTransport(), engines, PackingTransport(TorchTransport(), memmove_pieces)):
        assert fault_of(transport, device, host) is None
    for seen, was in zip(contents(device), before, strict=True):
        assert not seen[:, 1:4].any(), "pages 1, 2 and 3 were used"
        assert seen[:, [0, 4, 5]].equal(was[:, [0, 4, 5]])
    assert not any(bytes(view).strip(b"\0") for page in range(3) for view in host.page_views(page))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (raises, "RuntimeError: Failed to find C compiler"),
        (loses_a_page, "other bytes"),
        (in_another_order, "other bytes"),
        (writes_nothing, "writes other bytes"),
    ],
)
def test_a_fault_is_said(fault: Fault, said: str) -> None:
    device, host = device_pool(SHAPES["mha"], 5, 1), host_pool(SHAPES["mha"], 4, "page_first", 2)
    assert said in (fault_of(Faulty(fault=fault), device, host) or "none")


def raises_halfway(
    own: Faulty, src: Pool, dst: Pool, froms: PageIds, intos: PageIds
) -> tuple[PageIds, PageIds]:
    """After the first layer of a load, as a kernel that runs out of memory."""
    if len(own.copies) > 1:
        raise RuntimeError("out of memory")
    return froms, intos


@pytest.mark.parametrize("fault", [raises, raises_halfway, in_another_order])
def test_a_fault_leaves_zeros_too(fault: Fault) -> None:
    """Found: what raised left random bytes in both pools, NaN among them for whoever reads a page's rest."""
    device, host = device_pool(SHAPES["mha"], 5, 1), host_pool(SHAPES["mha"], 4, "page_first", 2)
    before = contents(device)
    assert fault_of(Faulty(fault=fault), device, host) is not None
    for seen, was in zip(contents(device), before, strict=True):
        assert not seen[:, 1:4].any(), "pages 1, 2 and 3 were used"
        assert seen[:, [0, 4, 5]].equal(was[:, [0, 4, 5]])
    assert not any(bytes(view).strip(b"\0") for page in range(3) for view in host.page_views(page))


def test_the_smallest_pools_can_be_asked() -> None:
    device, host = device_pool(SHAPES["mha"], 1, 1), host_pool(SHAPES["mha"], 1, "page_first", 2)
    assert fault_of(TorchTransport(), device, host) is None
    assert fault_of(Faulty(fault=writes_nothing), device, host) is not None


class UnderWay(TorchTransport):
    """Its copies are done when the stream has come to them, and not when its call returns."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[Callable[[], None]] = []

    def copy_pages(
        self, src: Pool, dst: Pool, src_pages: PageIds, dst_pages: PageIds, layers: range | None = None, /
    ) -> None:
        self.launched.append(partial(super().copy_pages, src, dst, src_pages, dst_pages, layers))

    def settle(self, device: object) -> None:
        for copy in self.launched:
            copy()
        self.launched.clear()


def test_copies_are_looked_at_when_they_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = UnderWay()
    monkeypatch.setattr(prove, "settle", transport.settle)
    device, host = device_pool(SHAPES["mha"], 5, 1), host_pool(SHAPES["mha"], 4, "page_first", 2)
    assert fault_of(transport, device, host) is None
    assert transport.launched == []


def test_loads_are_tried_layer_by_layer_and_writes_at_once() -> None:
    """As they are used: a load of one layer may be another variant than one of all."""
    device, host = device_pool(SHAPES["mha"], 5, 1), host_pool(SHAPES["mha"], 4, "page_first", 2)
    transport = Faulty()
    fault_of(transport, device, host)
    assert transport.copies == [*((False, range(at, at + 1)) for at in range(3)), (True, None)]


Found = tuple[Faulty | None, Faulty | None]  # the kernel, the copy engines


def chosen(
    io_backend: str, found: Found, monkeypatch: pytest.MonkeyPatch, asks: bool = True
) -> choose.Transport:
    """What is taken between two pools where these are found."""
    kernel, direct = found
    monkeypatch.setattr(choose, "_kernel", lambda: kernel)
    monkeypatch.setattr(choose, "_copy_engines", lambda: None)
    monkeypatch.setattr(choose, "_direct", lambda pieces: direct)
    monkeypatch.setattr(choose, "find_kernels", lambda: None)
    shape = SHAPES["mha"]
    pools = device_pool(shape, 5, 1), host_pool(shape, 4, "page_first", 2)
    return choose.make_transport(io_backend, "cuda", pools if asks else None)


@pytest.mark.parametrize(
    ("io_backend", "kernel", "direct", "want"),
    [
        ("kernel", None, None, "kernel"),
        ("kernel", raises, None, "direct"),
        ("kernel", in_another_order, raises, "torch"),
        ("direct", raises, None, "direct"),
        ("direct", None, loses_a_page, "torch"),
        ("auto", None, None, "auto"),
        ("auto", raises, None, "direct"),
        ("auto", None, raises, "kernel"),
        ("auto", raises, raises, "torch"),
    ],
)
def test_the_best_that_works_is_taken(
    io_backend: str,
    kernel: Fault | None,
    direct: Fault | None,
    want: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Found: without a C compiler triton raises at its first launch. With auto that ended the start; with
    kernel, every copy failed from then on."""
    found = Faulty("kernel", kernel), Faulty("direct", direct)
    with caplog.at_level(logging.WARNING):
        assert chosen(io_backend, found, monkeypatch).name == want
    refused = [each.name for each, fault in zip(found, (kernel, direct), strict=True) if fault]
    told = [record.message for record in caplog.records]
    asked = {"kernel": refused, "auto": refused, "direct": [n for n in refused if n == "direct"]}[io_backend]
    assert sorted(line.split(" ")[0] for line in told) == sorted(asked)


def test_all_of_auto_are_tried_before_one_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Faulty("kernel"), Faulty("direct")
    assert isinstance(chosen("auto", found, monkeypatch), CalibratedTransport)
    assert all(each.copies for each in found)


def test_pools_that_were_not_measured_get_none_that_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind auto is a transport for other pools: not the one that packs, where that does not work here."""
    found, refused = (Faulty("kernel"), Faulty("direct")), Faulty("pack", raises)
    monkeypatch.setattr(choose, "_packing", lambda kernel, pieces: refused)
    made = chosen("auto", found, monkeypatch)
    refused.copies.clear()
    device, host = device_pool(SHAPES["mha"], 5, 1), host_pool(SHAPES["mha"], 4, "page_first", 2)
    made.copy_pages(device, host, np.array([1, 2]), np.array([0, 1]), None)
    assert isinstance(made, CalibratedTransport) and refused not in made.candidates
    assert refused.copies == []


def test_without_pools_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Faulty("kernel", raises), Faulty("direct")
    assert chosen("kernel", found, monkeypatch, asks=False).name == "kernel" and not found[0].copies


@pytest.mark.parametrize("io_backend", ["kernel", "auto"])
def test_other_peoples_kernels_need_host_addresses_too(
    io_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: where registered memory has another address on the device, SGLang's kernels were still used."""

    class Unmapped:
        batched = True

        def reads_host_addresses(self, device: int) -> bool:
            return False

    monkeypatch.setattr(choose, "_copy_engines", lambda: Unmapped())
    monkeypatch.setattr(choose, "find_kernels", lambda: object())
    assert choose.make_transport(io_backend, "cuda").name == "dma"
