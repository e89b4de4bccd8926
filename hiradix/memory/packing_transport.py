"""Device to host through a staging buffer: the kernel packs pages on the device, the copy engines move them.

Small rows cross the bus slowly one by one. Packed in the host pool's own layout, a page is one or two large
pieces, so the bus sees only those. Loads go layer by layer and would move whole pages per layer: they do not
come here.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np
import torch

from hiradix.errors import Misuse
from hiradix.memory.cuda_runtime import Addresses
from hiradix.memory.dma_transport import CopyPieces, Pieces, device_of
from hiradix.memory.layout import PageRun, make_layout
from hiradix.memory.pools import HostPool, LaidOutPool, Pool
from hiradix.memory.transport import PageIds, Transport, checked_copy

STAGING_BYTES = 64 << 20


class PackingTransport:
    """Packs whole pages with `kernel`, then gives whole pieces to `copy_pieces`; all on the current stream.

    Only for all layers of pages to a `HostPool`; any other copy is the kernel's. The staging buffer, of at
    most `staging_bytes` but one page at least, is made per host pool and used again in stream order.
    """

    name = "pack"

    def __init__(
        self, kernel: Transport, copy_pieces: CopyPieces, note: str = "", staging_bytes: int = STAGING_BYTES
    ) -> None:
        self.note = note
        self._kernel = kernel
        self._copy_pieces = copy_pieces
        self._staging_bytes = staging_bytes
        self._staging: WeakKeyDictionary[Pool, LaidOutPool] = WeakKeyDictionary()

    def copy_pages(
        self, src: Pool, dst: Pool, src_pages: PageIds, dst_pages: PageIds, layers: range | None = None, /
    ) -> None:
        whole = layers is None or len(layers) == src.shape.num_layers
        if not isinstance(dst, HostPool) or not whole:
            self._kernel.copy_pages(src, dst, src_pages, dst_pages, layers)
            return
        if not checked_copy(src, dst, src_pages, dst_pages, layers):
            return
        staging = self._staging_for(src, dst)
        for begin in range(0, len(src_pages), staging.num_pages):
            some = slice(begin, begin + staging.num_pages)
            packed = np.arange(len(src_pages[some]))
            self._kernel.copy_pages(src, staging, src_pages[some], packed, None)
            with device_of(src, dst):
                self._copy_pieces(whole_pieces(staging, dst, packed, dst_pages[some]))

    def _staging_for(self, src: Pool, dst: HostPool) -> LaidOutPool:
        if dst not in self._staging:
            num_pages = max(1, min(dst.num_pages, self._staging_bytes // dst.page_bytes))
            layout = make_layout(dst.layout.name, dst.shape, num_pages, dst.page_size)
            buffer = torch.empty(layout.num_bytes, dtype=torch.uint8, device=src.device)
            self._staging[dst] = LaidOutPool(dst.shape, layout, dst.page_size, buffer)
        return self._staging[dst]


def whole_pieces(src: LaidOutPool, dst: LaidOutPool, src_pages: PageIds, dst_pages: PageIds) -> Pieces:
    """The pieces of whole pages between two pools of one layout, merged where pages follow each other."""
    if src.layout.name != dst.layout.name:
        raise Misuse(f"layouts {src.layout.name} and {dst.layout.name}")
    parts = []
    for ours, theirs in zip(src.layout.pieces, dst.layout.pieces, strict=True):
        sizes = np.full(len(src_pages), ours.num_bytes, np.int64)
        into, taken = _begins(dst, theirs, dst_pages), _begins(src, ours, src_pages)
        parts.append(Pieces(into, taken, sizes))
    joined = [np.concatenate([getattr(part, name) for part in parts]) for name in ("dst", "src", "sizes")]
    return Pieces(joined[0], joined[1], joined[2]).merged(dst.cuts)


def _begins(pool: LaidOutPool, piece: PageRun, pages: PageIds) -> Addresses:
    begins: Addresses = pool.buffer.data_ptr() + piece.offset + np.asarray(pages, np.int64) * piece.page
    return begins
