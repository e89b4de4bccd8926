"""A device pool over an engine's own block tensors, whatever order their axes have in memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hiradix.errors import ConfigError, Misuse
from hiradix.memory.layout import Plane
from hiradix.memory.pools import LayerCounter, Pool, stacked
from hiradix.memory.shape import WORDS, CacheShape


class StridedPool(Pool):
    """Pages that another allocator owns: per array and layer a view [P, S, H, D] of any strides, zero copy.

    arrays: one list of [L] views per array of `shape`, alike in all layers. Where a last axis is not
    contiguous, as of keys kept transposed, only the torch transport can copy: there are no planes then.
    The engine keeps the memory alive and in place, and knows which pages are in use. Raises ConfigError if
    the views do not fit the shape or differ between layers.
    """

    def __init__(self, shape: CacheShape, arrays: Sequence[Sequence[torch.Tensor]]) -> None:
        if len(arrays) != len(shape.arrays) or any(len(views) != shape.num_layers for views in arrays):
            found = [len(views) for views in arrays]
            raise ConfigError(f"device pool: views of {found} layers for {shape}")
        first = arrays[0][0]
        self.shape = shape
        self.page_limit, self.page_size = first.shape[0], first.shape[1]
        self.device = first.device
        for number, views in enumerate(arrays):
            _check(shape, number, views, first)
        planes = [_plane(shape, number, views) for number, views in enumerate(arrays)]
        self._keep(planes, [list(views) for views in arrays], [stacked(views) for views in arrays])
        self._has_planes = all(views[0].stride(3) == 1 or views[0].shape[3] == 1 for views in arrays)
        self.counter: LayerCounter | None = None

    def planes(self) -> tuple[Plane, ...]:
        if not self._has_planes:
            raise Misuse(f"{self.shape} with last axes that are not contiguous has no planes")
        return super().planes()

    def register_layer_transfer_counter(self, counter: LayerCounter | None) -> None:
        """Kept for who waits on the engine's behalf: nothing here is read through the pool."""
        self.counter = counter


def _check(shape: CacheShape, number: int, views: Sequence[torch.Tensor], first: torch.Tensor) -> None:
    spec = shape.arrays[number]
    wanted = (*first.shape[:2], spec.num_heads, spec.head_dim)
    for layer, view in enumerate(views):
        same = (tuple(view.shape), view.dtype, view.device) == (wanted, spec.dtype, first.device)
        if not same or view.stride() != views[0].stride():
            raise ConfigError(
                f"device pool: {spec.name} of layer {layer} is {tuple(view.shape)} {view.dtype} on "
                f"{view.device} with strides {view.stride()}; needed: {wanted} {spec.dtype} on "
                f"{first.device}, strides alike in all layers"
            )
    if spec.dtype.itemsize not in WORDS:
        raise ConfigError(f"device pool: elements of {spec.dtype.itemsize} bytes")


def _plane(shape: CacheShape, number: int, views: Sequence[torch.Tensor]) -> Plane:
    spec = shape.arrays[number]
    page, token, head, _ = (stride * spec.dtype.itemsize for stride in views[0].stride())
    return Plane(spec, tuple(view.data_ptr() for view in views), page, token, head)
