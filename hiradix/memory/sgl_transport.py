"""Page copies by SGLang's own kernels, where the package `sgl_kernel` is installed.

What its kernels serve: K and V of one shape, or MLA latents, between per-layer device buffers and a host pool
in layer_first or page_first; loads per layer, writes of all layers (of layer_first also per layer). Every
other copy goes to the transport behind it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from hiradix.memory.pools import DevicePool, HostPool, Pool
from hiradix.memory.shape import KVShape, MLAShape
from hiradix.memory.transport import PageIds, Transport, checked_copy
from hiradix.memory.upload import upload

Indices = tuple[torch.Tensor, torch.Tensor]  # int64 slots: sources, targets
_ALIGNMENT = 8  # bytes a row must be a multiple of


def find_kernels() -> Any | None:
    """The module of copy kernels, None where it is not installed."""
    try:
        return importlib.import_module("sgl_kernel.kvcacheio")
    except ImportError:
        return None


class SglKernelTransport:
    """Calls `kernels` (the module sgl_kernel.kvcacheio) where it can, `otherwise` where it cannot."""

    name = "sgl_kernel"

    def __init__(self, kernels: Any, otherwise: Transport, note: str = "") -> None:
        self.note = note
        self._kernels = kernels
        self._otherwise = otherwise
        self._tables: WeakKeyDictionary[Pool, list[torch.Tensor]] = WeakKeyDictionary()

    def copy_pages(
        self, src: Pool, dst: Pool, src_pages: PageIds, dst_pages: PageIds, layers: range | None = None, /
    ) -> None:
        span = checked_copy(src, dst, src_pages, dst_pages, layers)
        if not span:
            return
        call = self._call_for(src, dst, span)
        if call is None:
            self._otherwise.copy_pages(src, dst, src_pages, dst_pages, layers)
            return
        device = (src if isinstance(src, DevicePool) else dst).device
        call((_slots(src_pages, src.page_size, device), _slots(dst_pages, dst.page_size, device)))

    def _call_for(self, src: Pool, dst: Pool, span: range) -> Callable[[Indices], None] | None:
        """The kernel calls for a copy, None where there are none."""
        if isinstance(src, HostPool) and isinstance(dst, DevicePool) and _is_served(dst, src):
            return lambda indices: self._load(src, dst, span, indices)
        if not (isinstance(src, DevicePool) and isinstance(dst, HostPool) and _is_served(src, dst)):
            return None
        if len(span) == src.shape.num_layers:
            return lambda indices: self._write(src, dst, indices)
        if dst.layout.name == "layer_first":
            return lambda indices: self._write_layers(src, dst, span, indices)
        return None

    def _load(self, host: HostPool, device: DevicePool, span: range, indices: Indices) -> None:
        """Host to device, layer by layer."""
        options = _options(device, indices)
        for layer in span:
            if host.layout.name == "layer_first":
                self._one_layer(_layer(host, layer), _layer(device, layer), options)
            else:
                named = _named("src", _whole(host)) | _named("dst", _layer(device, layer))
                extra = {"layer_id": layer, "src_layout_dim": _layout_dim(host)}
                self._run("per_layer", device, "_pf_lf", named | options | extra)

    def _write_layers(self, device: DevicePool, host: HostPool, span: range, indices: Indices) -> None:
        for layer in span:
            self._one_layer(_layer(device, layer), _layer(host, layer), _options(device, indices))

    def _one_layer(self, src: list[torch.Tensor], dst: list[torch.Tensor], options: dict[str, Any]) -> None:
        suffix = "" if len(src) > 1 else "_mla"
        call = getattr(self._kernels, f"transfer_kv_per_layer{suffix}")
        call(**_named("src", src), **_named("dst", dst), **options)

    def _write(self, device: DevicePool, host: HostPool, indices: Indices) -> None:
        """Device to host, all layers in one call."""
        named = _named("src", self._table(device), "_layers")
        options = _options(device, indices) | {"num_layers": device.shape.num_layers}
        if host.layout.name == "layer_first":
            named |= _named("dst", self._table(host, device.device), "_layers")
            self._run("all_layer", device, "", named | options)
        else:
            named |= _named("dst", _whole(host))
            self._run("all_layer", device, "_lf_pf", named | options | {"dst_layout_dim": _layout_dim(host)})

    def _run(self, kind: str, device: DevicePool, layouts: str, arguments: dict[str, Any]) -> None:
        mla = "_mla" if isinstance(device.shape, MLAShape) else ""
        getattr(self._kernels, f"transfer_kv_{kind}{mla}{layouts}")(**arguments)

    def _table(self, pool: Pool, device: torch.device | None = None) -> list[torch.Tensor]:
        """uint64 [L] addresses of the layers, per array, where the kernels read them."""
        if pool not in self._tables:
            self._tables[pool] = [
                torch.tensor(plane.layers, dtype=torch.uint64, device=device or pool.device)
                for plane in pool.planes()
            ]
        return self._tables[pool]


def _is_served(device: DevicePool, host: HostPool) -> bool:
    arrays = device.shape.arrays
    alike = isinstance(device.shape, KVShape) and arrays[0].row_bytes == arrays[1].row_bytes
    latent = isinstance(device.shape, MLAShape) and len(arrays) == 1
    known = host.layout.name in ("layer_first", "page_first")
    return (alike or latent) and known and arrays[0].row_bytes % _ALIGNMENT == 0


def _slots(pages: PageIds, page_size: int, device: torch.device) -> torch.Tensor:
    """int64: one index per token."""
    first = np.asarray(pages, np.int64)[:, None] * page_size
    return upload(torch.from_numpy((first + np.arange(page_size)).reshape(-1)), device)


def _options(device: DevicePool, indices: Indices) -> dict[str, Any]:
    row = device.shape.arrays[0].row_bytes
    return {"src_indices": indices[0], "dst_indices": indices[1], "item_size": row}


def _layout_dim(host: HostPool) -> int:
    return host.shape.num_layers * host.shape.arrays[0].row_bytes


def _layer(pool: Pool, layer: int) -> list[torch.Tensor]:
    """A layer of each array, [slots, H, D]."""
    return [pool.layer_views(array)[layer].flatten(0, 1) for array in range(len(pool.shape.arrays))]


def _whole(host: HostPool) -> list[torch.Tensor]:
    """Each array as the layout has it."""
    return [host.array(spec.name) for spec in host.shape.arrays]


def _named(side: str, arrays: list[torch.Tensor], suffix: str = "") -> dict[str, torch.Tensor]:
    """Arguments src_k, src_v, or src alone, with the kernels' suffix."""
    if len(arrays) == 1:
        return {f"{side}{suffix}": arrays[0]}
    return {f"{side}_{name}{suffix}": array for name, array in zip("kv", arrays, strict=True)}
