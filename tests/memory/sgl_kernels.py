"""A stand-in for sgl_kernel.kvcacheio on the CPU: its functions by keyword, one index per token."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

calls: list[str] = []


def _check(src_indices: torch.Tensor, dst_indices: torch.Tensor, item_size: int) -> None:
    for indices in (src_indices, dst_indices):
        assert indices.dtype is torch.int64 and indices.is_contiguous()
    assert len(src_indices) == len(dst_indices) and item_size % 8 == 0


def _move(src: int, dst: int, steps: tuple[int, int], given: dict[str, Any]) -> None:
    """Rows of item_size bytes; `steps` bytes between the slots of either side."""
    _check(given["src_indices"], given["dst_indices"], given["item_size"])
    for a, b in zip(given["src_indices"].tolist(), given["dst_indices"].tolist(), strict=True):
        ctypes.memmove(dst + b * steps[1], src + a * steps[0], given["item_size"])


def _addresses(table: torch.Tensor) -> list[int]:
    assert table.dtype is torch.uint64
    return [int(address) for address in table.tolist()]


def _arrays(given: dict[str, Any], side: str, suffix: str = "") -> list[torch.Tensor]:
    names = [f"{side}{suffix}"] if f"{side}{suffix}" in given else [f"{side}_{kv}{suffix}" for kv in "kv"]
    return [given.pop(name) for name in names]


def _one(name: str, **given: Any) -> None:
    calls.append(name)
    item = given["item_size"]
    for src, dst in zip(_arrays(given, "src"), _arrays(given, "dst"), strict=True):
        _move(src.data_ptr(), dst.data_ptr(), (item, item), given)
    assert set(given) == {"src_indices", "dst_indices", "item_size"}


def _one_pf_lf(name: str, **given: Any) -> None:
    calls.append(name)
    item, layer, step = given["item_size"], given["layer_id"], given["src_layout_dim"]
    for src, dst in zip(_arrays(given, "src"), _arrays(given, "dst"), strict=True):
        _move(src.data_ptr() + layer * item, dst.data_ptr(), (step, item), given)
    assert set(given) == {"src_indices", "dst_indices", "item_size", "layer_id", "src_layout_dim"}


def _all(name: str, **given: Any) -> None:
    calls.append(name)
    item = given["item_size"]
    for src, dst in zip(_arrays(given, "src", "_layers"), _arrays(given, "dst", "_layers"), strict=True):
        assert len(src) == len(dst) == given["num_layers"]
        for a, b in zip(_addresses(src), _addresses(dst), strict=True):
            _move(a, b, (item, item), given)
    assert set(given) == {"src_indices", "dst_indices", "item_size", "num_layers"}


def _all_lf_pf(name: str, **given: Any) -> None:
    calls.append(name)
    item, step = given["item_size"], given["dst_layout_dim"]
    for src, dst in zip(_arrays(given, "src", "_layers"), _arrays(given, "dst"), strict=True):
        for layer, a in enumerate(_addresses(src)):
            _move(a, dst.data_ptr() + layer * item, (item, step), given)
    assert set(given) == {"src_indices", "dst_indices", "item_size", "num_layers", "dst_layout_dim"}


def transfer_kv_per_layer(*, src_k: Any, dst_k: Any, src_v: Any, dst_v: Any, **rest: Any) -> None:
    _one("per_layer", src_k=src_k, dst_k=dst_k, src_v=src_v, dst_v=dst_v, **rest)


def transfer_kv_per_layer_pf_lf(*, src_k: Any, dst_k: Any, src_v: Any, dst_v: Any, **rest: Any) -> None:
    _one_pf_lf("per_layer_pf_lf", src_k=src_k, dst_k=dst_k, src_v=src_v, dst_v=dst_v, **rest)


def transfer_kv_all_layer(
    *, src_k_layers: Any, dst_k_layers: Any, src_v_layers: Any, dst_v_layers: Any, **rest: Any
) -> None:
    sources = {"src_k_layers": src_k_layers, "src_v_layers": src_v_layers}
    _all("all_layer", **sources, dst_k_layers=dst_k_layers, dst_v_layers=dst_v_layers, **rest)


def transfer_kv_all_layer_lf_pf(
    *, src_k_layers: Any, dst_k: Any, src_v_layers: Any, dst_v: Any, **rest: Any
) -> None:
    sources = {"src_k_layers": src_k_layers, "src_v_layers": src_v_layers}
    _all_lf_pf("all_layer_lf_pf", **sources, dst_k=dst_k, dst_v=dst_v, **rest)


def transfer_kv_per_layer_mla(*, src: Any, dst: Any, **rest: Any) -> None:
    _one("per_layer_mla", src=src, dst=dst, **rest)


def transfer_kv_per_layer_mla_pf_lf(*, src: Any, dst: Any, **rest: Any) -> None:
    _one_pf_lf("per_layer_mla_pf_lf", src=src, dst=dst, **rest)


def transfer_kv_all_layer_mla(*, src_layers: Any, dst_layers: Any, **rest: Any) -> None:
    _all("all_layer_mla", src_layers=src_layers, dst_layers=dst_layers, **rest)


def transfer_kv_all_layer_mla_lf_pf(*, src_layers: Any, dst: Any, **rest: Any) -> None:
    _all_lf_pf("all_layer_mla_lf_pf", src_layers=src_layers, dst=dst, **rest)
