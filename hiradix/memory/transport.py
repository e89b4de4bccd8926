"""Page copies between pools behind one call; the torch transport, which runs on CPUs and is the reference.

A transport copies whole pages between two pools of one shape, for all layers or a range of them, on the
current stream. Page lists are any integer arrays of one length; destination pages are named at most once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from hiradix.errors import Misuse
from hiradix.memory.pools import Pool
from hiradix.memory.shape import WORDS
from hiradix.memory.upload import upload

PageIds = npt.NDArray[np.integer[Any]]
T = TypeVar("T")
Run = tuple[int, int, int]  # first source page, first target page, number of pages

# Below this many bytes per call and page, one indexed copy of all pages beats a call per run of pages.
_RUN_BYTES = 128 << 10
# Pages per indexed copy, so that its temporary stays in this many bytes.
_GATHER_BYTES = 32 << 20


class Transport(Protocol):
    """The border to libraries that copy pages.

    name: such as "torch", "triton" or "dma". note: why it was chosen, for the start-up line.
    """

    name: str
    note: str

    def copy_pages(
        self, src: Pool, dst: Pool, src_pages: PageIds, dst_pages: PageIds, layers: range | None = None, /
    ) -> None:
        """Copy page `src_pages[i]` to page `dst_pages[i]`, in `layers` (None: all) and all arrays. Nothing else
        is written.

        With CUDA pools the copy is ordered on the current stream and may still run when this returns; the
        page lists may be reused at once. Raises Misuse for pages outside the pools and for pools of different
        shape.
        """
        ...


class TorchTransport:
    """Copies with torch calls. On a CPU: done on return. Between devices: in order, blocking the caller.

    arrays: the numbers of the arrays it copies, None for all.
    """

    name = "torch"

    def __init__(self, note: str = "", arrays: Collection[int] | None = None) -> None:
        self.note = note
        self._arrays = arrays

    def copy_pages(
        self, src: Pool, dst: Pool, src_pages: PageIds, dst_pages: PageIds, layers: range | None = None, /
    ) -> None:
        span = checked_copy(src, dst, src_pages, dst_pages, layers)
        if not span:
            return
        pages: tuple[torch.Tensor, torch.Tensor] | None = None
        runs: list[Run] | None = None
        for array, spec in enumerate(src.shape.arrays):
            if self._arrays is not None and array not in self._arrays:
                continue
            page_bytes = spec.row_bytes * spec.rows(src.page_size)
            for source, target in _view_pairs(src, dst, array, span):
                whole = page_bytes * (len(span) if source.dim() == 5 else 1) >= _RUN_BYTES
                if whole or source.device != target.device or len(src_pages) == 1:
                    runs = runs or _runs((src, src_pages), (dst, dst_pages))
                    _copy_runs(source, target, runs)
                else:
                    pages = pages or (_indices(src_pages, source.device), _indices(dst_pages, source.device))
                    _copy_indexed(source, target, *pages)


class PerPair(Generic[T]):
    """Values that a transport keeps for pairs of pools, source and destination, while both live."""

    def __init__(self) -> None:
        self._kept: WeakKeyDictionary[Pool, WeakKeyDictionary[Pool, T]] = WeakKeyDictionary()

    def __len__(self) -> int:
        return sum(len(by_dst) for by_dst in self._kept.values())

    def get(self, src: Pool, dst: Pool) -> T | None:
        """The value of a pair, None if there is none."""
        by_dst = self._kept.get(src)
        return None if by_dst is None else by_dst.get(dst)

    def set(self, src: Pool, dst: Pool, value: T) -> None:
        """Keep the value of a pair, in place of an earlier one."""
        self._kept.setdefault(src, WeakKeyDictionary())[dst] = value

    def of(self, src: Pool, dst: Pool, make: Callable[[Pool, Pool], T]) -> T:
        """The value of a pair, made if there is none."""
        value = self.get(src, dst)
        if value is None:
            value = make(src, dst)
            self.set(src, dst, value)
        return value


def checked_copy(src: Pool, dst: Pool, src_pages: PageIds, dst_pages: PageIds, layers: range | None) -> range:
    """The layers to copy, none where no page is named. Costs the pages.

    Raises Misuse unless the pools hold the same bytes per page, and the pages and layers exist.
    """
    _check_pages(src, dst, src_pages, dst_pages)
    span = range(src.shape.num_layers) if layers is None else layers
    if not (span.step == 1 and (len(span) == 0 or 0 <= span[0] <= span[-1] < src.shape.num_layers)):
        raise Misuse(f"layers {span} of {src.shape.num_layers}")
    return span if len(src_pages) else range(0)


def _check_pages(src: Pool, dst: Pool, src_pages: PageIds, dst_pages: PageIds) -> None:
    if src.shape.arrays != dst.shape.arrays or src.shape.num_layers != dst.shape.num_layers:
        raise Misuse(f"pools of different shape: {src.shape} and {dst.shape}")
    if src.page_size != dst.page_size:
        raise Misuse(f"page sizes {src.page_size} and {dst.page_size}")
    if len(src_pages) != len(dst_pages):
        raise Misuse(f"{len(src_pages)} source pages for {len(dst_pages)}")
    for name, pages, limit in (("source", src_pages, src.page_limit), ("target", dst_pages, dst.page_limit)):
        if len(pages):
            low, high = int(pages.min()), int(pages.max())
            if low < 0 or high >= limit:
                raise Misuse(f"{name} pages {low}..{high} of a pool of {limit}")


Views = tuple[torch.Tensor, torch.Tensor]


def _view_pairs(src: Pool, dst: Pool, array: int, span: range) -> Iterator[Views]:
    """The copy of one array: both sides as [P, S, H, D] per layer, or once [L, P, S, H, D]."""
    source, target = src.stacked_view(array), dst.stacked_view(array)
    if source is not None and target is not None and len(span) > 1 and not (src.cuts or dst.cuts):
        yield source[span.start : span.stop], target[span.start : span.stop]
        return
    sources, targets = src.layer_views(array), dst.layer_views(array)
    for layer in span:
        yield sources[layer], targets[layer]


def _copy_runs(source: torch.Tensor, target: torch.Tensor, runs: Sequence[Run]) -> None:
    """One copy per run."""
    dim = source.dim() - 4
    for src_page, dst_page, num_pages in runs:
        target.narrow(dim, dst_page, num_pages).copy_(source.narrow(dim, src_page, num_pages))


def _indices(pages: PageIds, device: torch.device) -> torch.Tensor:
    return upload(torch.from_numpy(pages.astype(np.int64)), device)


def _copy_indexed(
    source: torch.Tensor, target: torch.Tensor, src_pages: torch.Tensor, dst_pages: torch.Tensor
) -> None:
    """All pages of a layer by index, a temporary's worth at a time, moved as integers of the same size."""
    if source.dim() == 5:
        for layer in range(source.shape[0]):
            _copy_indexed(source[layer], target[layer], src_pages, dst_pages)
        return
    word = WORDS[source.dtype.itemsize]
    src_words, dst_words = source.view(word), target.view(word)
    step = max(1, _GATHER_BYTES // (source[0].numel() * source.dtype.itemsize))
    for begin in range(0, len(src_pages), step):
        taken = src_words.index_select(0, src_pages[begin : begin + step])
        dst_words.index_copy_(0, dst_pages[begin : begin + step], taken)


def _runs(src: tuple[Pool, PageIds], dst: tuple[Pool, PageIds]) -> list[Run]:
    """Runs in which both lists ascend by one, and which CUDA may copy at once."""
    breaks = np.zeros(len(src[1]) - 1, np.bool_)
    for pool, pages in (src, dst):
        breaks |= np.diff(pages) != 1
        if pool.cut_pages:
            breaks |= np.isin(pages[1:], list(pool.cut_pages))
    edges = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(src[1])]
    begins, ends = edges[:-1], edges[1:]
    return [(int(src[1][at]), int(dst[1][at]), end - at) for at, end in zip(begins, ends, strict=True)]
