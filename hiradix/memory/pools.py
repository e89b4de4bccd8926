"""The two page pools: the device pool the model reads and writes, and the host pool behind it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Protocol

import torch

from hiradix.errors import ConfigError, Misuse
from hiradix.memory.foreign import check_foreign, foreign_arrays
from hiradix.memory.host_memory import allocate, huge_page_bytes
from hiradix.memory.layout import Extent, Layout, Plane, array_views, layers_view, make_layout
from hiradix.memory.numa import node_of
from hiradix.memory.shape import CacheShape, KVShape, MLAShape, array_index, check_page_size

logger = logging.getLogger(__name__)


class LayerCounter(Protocol):
    """The border to an engine's layer gate, as the getters use it: returns when layer `layer` of the
    pending loads may be read."""

    def wait_until(self, layer: int, /) -> None: ...


class Pool:
    """A pool as transports need it: its arrays as planes and views, made once by `_keep`.

    cuts: addresses that no single copy by CUDA may go over. cut_pages: pages that begin at one of them, in any
    array and layer. page_limit: page ids are below this.
    """

    shape: CacheShape
    page_size: int
    device: torch.device
    page_limit: int
    cuts: tuple[int, ...] = ()
    cut_pages: frozenset[int] = frozenset()

    def _keep(
        self,
        planes: Iterable[Plane],
        views: Iterable[list[torch.Tensor]],
        stacked: Iterable[torch.Tensor | None],
    ) -> None:
        """Each of them by array, in the order of the shape's."""
        self._planes, self._views, self._stacked = tuple(planes), list(views), list(stacked)

    @property
    def reachable(self) -> bool:
        """Whether a CUDA kernel can use the addresses: device or pinned memory."""
        return self.device.type == "cuda"

    def planes(self) -> tuple[Plane, ...]:
        """The address and strides of every array."""
        return self._planes

    def layer_views(self, array: int) -> list[torch.Tensor]:
        """[L] of [P, S, H, D], zero copy; S is 1 in arrays with one row per page."""
        return self._views[array]

    def stacked_view(self, array: int) -> torch.Tensor | None:
        """[L, P, S, H, D], zero copy; None where the layers are separate allocations."""
        return self._stacked[array]


class DevicePool(Pool):
    """Paged KV on the compute device: one tensor [(num_pages + 1) * page_size, H, D] per layer and array.

    An array with one row per page has [num_pages + 1, H, D]. Pages 1..num_pages are handed out; page 0, so
    slot 0, is where masked writes go. The pool does not know which pages are in use. The getters wait on the
    registered layer gate; everything else does not.
    """

    def __init__(
        self, shape: CacheShape, num_pages: int, page_size: int, device: torch.device | str = "cpu"
    ) -> None:
        if num_pages < 1 or page_size < 1:
            raise ConfigError(f"device pool: {num_pages} pages of {page_size} tokens: both must be positive")
        check_page_size(shape, page_size)
        arrays = []
        for spec in shape.arrays:
            rows = (num_pages + 1) * spec.rows(page_size)
            size = (shape.num_layers, rows, spec.num_heads, spec.head_dim)
            arrays.append(list(torch.zeros(size, dtype=spec.dtype, device=device)))
        self._set(shape, page_size, arrays)

    def _set(self, shape: CacheShape, page_size: int, arrays: list[list[torch.Tensor]]) -> None:
        self.shape = shape
        self.page_size = page_size
        self.page_limit = arrays[0][0].shape[0] // shape.arrays[0].rows(page_size)
        self.num_pages = self.page_limit - 1
        self.device = arrays[0][0].device
        self.dtype = shape.dtype
        self.size = self.num_pages * page_size
        self.start_layer = 0
        self._arrays = arrays
        self._counter: LayerCounter | None = None
        self._keep(
            [_device_plane(self, array) for array in range(len(arrays))],
            [[_in_pages(buffer, self.page_limit) for buffer in buffers] for buffers in arrays],
            [stacked([_in_pages(buffer, self.page_limit) for buffer in buffers]) for buffers in arrays],
        )

    @classmethod
    def wrap(
        cls, k_buffers: Sequence[torch.Tensor], v_buffers: Sequence[torch.Tensor], page_size: int
    ) -> DevicePool:
        """A pool over an engine's own buffers, [L] of [size + page_size, H, D] each, with page 0 the dummy.

        Zero copy; the engine keeps the memory alive and in place. Raises ConfigError unless all are
        contiguous, of one geometry per array, on one device and of whole pages.
        """
        arrays = [list(k_buffers), list(v_buffers)]
        check_foreign(arrays, page_size)
        keys, values = arrays[0][0], arrays[1][0]
        shape = KVShape(len(arrays[0]), keys.shape[1], keys.shape[2], values.shape[2], keys.dtype)
        return cls._over(shape, page_size, arrays)

    @classmethod
    def wrap_latent(cls, kv_buffers: Sequence[torch.Tensor], page_size: int, kv_lora_rank: int) -> DevicePool:
        """Make a pool of MLA buffers, L of [size + page_size, 1, C] each; the caller keeps them, as with
        `wrap`."""
        arrays = [list(kv_buffers)]
        check_foreign(arrays, page_size)
        latent = arrays[0][0]
        if not 0 < kv_lora_rank < latent.shape[2]:
            raise ConfigError(f"device pool: kv_lora_rank {kv_lora_rank} of rows of {latent.shape[2]}")
        rope = latent.shape[2] - kv_lora_rank
        return cls._over(MLAShape(len(arrays[0]), kv_lora_rank, rope, latent.dtype), page_size, arrays)

    @classmethod
    def wrap_arrays(
        cls, shape: CacheShape, buffers: Mapping[str, Sequence[torch.Tensor]], page_size: int
    ) -> DevicePool:
        """A pool of `shape` over an engine's own buffers, [L] per array by name, page 0 the dummy's.

        Zero copy. A buffer may have any shape and type of the right bytes, such as an indexer's
        [pages, 132 * page_size]. Raises ConfigError naming the array that is missing, not declared by
        `shape`, not contiguous, or not as large as its pages.
        """
        check_page_size(shape, page_size)
        return cls._over(shape, page_size, foreign_arrays(shape, buffers, page_size))

    @classmethod
    def _over(cls, shape: CacheShape, page_size: int, arrays: list[list[torch.Tensor]]) -> DevicePool:
        pool = cls.__new__(cls)
        pool._set(shape, page_size, arrays)
        return pool

    @property
    def k_buffer(self) -> list[torch.Tensor]:
        """[L] of [slots, H, D], not gated."""
        return self._arrays[0]

    @property
    def v_buffer(self) -> list[torch.Tensor]:
        """[L] of [slots, H, Dv], not gated. MLA has none: its values are the front of the latent rows."""
        return self.array("v")

    def array(self, name: str) -> list[torch.Tensor]:
        """[L] of the array called `name`, not gated."""
        return self._arrays[array_index(self.shape, name)]

    @property
    def kv_buffer(self) -> list[torch.Tensor]:
        """MLA's [L] of [slots, 1, C], not gated."""
        return self._arrays[0]

    def register_layer_transfer_counter(self, counter: LayerCounter | None) -> None:
        """Have the getters wait for `counter` from now on; None takes it away."""
        self._counter = counter

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """[slots, H, D] of the layer, once its pending load has arrived. Writable, zero copy."""
        self._wait(layer_id)
        return self._arrays[0][layer_id - self.start_layer]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """[slots, H, Dv] of the layer, once its load has arrived; for MLA the front of the latent rows."""
        self._wait(layer_id)
        layer = layer_id - self.start_layer
        if isinstance(self.shape, MLAShape):
            return self._arrays[0][layer][..., : self.shape.kv_lora_rank]
        return self._arrays[1][layer]

    def get_arrays(self, layer_id: int) -> tuple[torch.Tensor, ...]:
        """All arrays of the layer, in the shape's order, once its load has arrived. Writable, zero copy."""
        self._wait(layer_id)
        return tuple(buffers[layer_id - self.start_layer] for buffers in self._arrays)

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Both getters at once."""
        return self.get_key_buffer(layer_id), self.get_value_buffer(layer_id)

    def _wait(self, layer_id: int) -> None:
        if self._counter is not None:
            self._counter.wait_until(layer_id - self.start_layer)


class LaidOutPool(Pool):
    """Pages 0..num_pages-1 in one layout over one buffer uint8 [layout.num_bytes], on any device."""

    def __init__(self, shape: CacheShape, layout: Layout, page_size: int, buffer: torch.Tensor) -> None:
        self.layout = layout
        self.shape = shape
        self.num_pages = self.page_limit = layout.num_pages
        self.page_size = page_size
        self.device = buffer.device
        self.dtype = shape.dtype
        self.buffer = buffer
        stacked = [
            layers_view(buffer, plane, Extent.of(plane.spec, shape, layout.num_pages, page_size))
            for plane in layout.planes
        ]
        planes = [plane.moved(buffer.data_ptr()) for plane in layout.planes]
        self._keep(planes, [list(whole) for whole in stacked], stacked)

    @property
    def page_bytes(self) -> int:
        return self.layout.page_bytes

    @property
    def size(self) -> int:
        """Tokens."""
        return self.num_pages * self.page_size

    def array(self, name: str) -> torch.Tensor:
        """The array called `name` in the layout's shape, zero copy; page_blob's interleave and have none."""
        return array_views(self.buffer, self.layout)[array_index(self.shape, name)]


class HostPool(LaidOutPool):
    """Pages in host memory, one buffer in one layout; pinned, and near it, where `device` is a CUDA device.

    A page's bytes, its views joined, are SGLang's flat data page. Writers of a page are ordered by whoever
    owns it: the pool takes no lock. Memory is resident when this returns; see `allocate`. What was had is
    logged (INFO).
    """

    def __init__(
        self,
        shape: CacheShape,
        num_pages: int,
        page_size: int,
        *,
        layout: str = "page_first",
        device: torch.device | str = "cpu",
    ) -> None:
        check_page_size(shape, page_size)
        made, near = make_layout(layout, shape, num_pages, page_size), torch.device(device)
        self.is_pinned = near.type == "cuda"
        self.node = node_of(near)
        cpus = () if self.node is None else self.node.cpus
        with torch.cuda.device(near) if self.is_pinned else nullcontext():
            buffer, self.cuts = allocate(made.num_bytes, pin=self.is_pinned, unit=made.cut_unit, cpus=cpus)
        super().__init__(shape, made, page_size, buffer)
        self.cut_pages = frozenset(made.pages_at(cut - buffer.data_ptr() for cut in self.cuts))
        self._bytes = memoryview(buffer.numpy().data)
        if logger.isEnabledFor(logging.INFO):
            logger.info("%s", self.describe())

    @property
    def reachable(self) -> bool:
        return self.is_pinned

    def describe(self) -> str:
        """The start-up line: pages, bytes, layout, huge pages, whether it is pinned and where it lies."""
        huge, total = huge_page_bytes(self.buffer.data_ptr()), self.layout.num_bytes
        return (
            f"host memory: {self.num_pages} pages x {self.page_bytes} bytes = {total / 1e9:.2f} GB, "
            f"layout {self.layout.name}, {min(1.0, huge / total):.0%} in huge pages, "
            f"{'pinned' if self.is_pinned else 'not pinned'}, "
            f"NUMA node {'any' if self.node is None else self.node.number}"
        )

    @property
    def kv_buffer(self) -> torch.Tensor:
        """The pool as SGLang's one tensor (K first); flat bytes where its arrays differ or interleave."""
        if not self.layout.joint:
            return self.buffer
        shape = self.layout.array_shapes[0]
        lead = (len(self.layout.planes),) if len(self.layout.planes) > 1 else ()
        return self.buffer.view(self.dtype).view(*lead, *shape)

    @property
    def k_buffer(self) -> torch.Tensor:
        return self.array("k")

    @property
    def v_buffer(self) -> torch.Tensor:
        return self.array("v")

    @property
    def memory(self) -> memoryview:
        """All of the pool's bytes, for those that register memory before they move pages."""
        return self._bytes

    def page_views(self, page: int) -> list[memoryview]:
        """The page's bytes, in order, zero copy and writable; valid as long as the pool."""
        if not 0 <= page < self.num_pages:
            raise Misuse(f"host page {page} of {self.num_pages}")
        views = []
        for piece in self.layout.pieces:
            begin = piece.offset + page * piece.page
            views.append(self._bytes[begin : begin + piece.num_bytes])
        return views


def _device_plane(pool: DevicePool, array: int) -> Plane:
    spec = pool.shape.arrays[array]
    begins = tuple(buffer.data_ptr() for buffer in pool._arrays[array])
    return Plane(spec, begins, spec.rows(pool.page_size) * spec.row_bytes, spec.row_bytes, spec.head_bytes)


def _in_pages(buffer: torch.Tensor, num_pages: int) -> torch.Tensor:
    """[P, S, H, D] over a layer's [P * S, H, D]."""
    return buffer.view(num_pages, -1, *buffer.shape[1:])


def stacked(views: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """[L, P, S, H, D] over the [P, S, H, D] of all layers where they lie at one distance in one storage."""
    first = views[0]
    storage = first.untyped_storage().data_ptr()
    offsets = [view.storage_offset() for view in views]
    step = offsets[1] - offsets[0] if len(offsets) > 1 else 0
    even = all(later - earlier == step for earlier, later in zip(offsets, offsets[1:], strict=False))
    if not even or step < 0 or any(view.untyped_storage().data_ptr() != storage for view in views):
        return None
    return first.as_strided((len(views), *first.shape), (step, *first.stride()), offsets[0])
