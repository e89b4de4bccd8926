"""SGLang's device pools as ours, over the same memory: by the arrays that they have, not by their class.

    a pool's tensors -> those a page consists of, by name -> a shape -> a pool of ours

Every tensor of a pool is either one of a page's arrays, or what nobody has to keep (addresses), or the pool is
refused, by its class and the tensor's name. So is one whose class is known to address its arrays otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

from hiradix.errors import ConfigError
from hiradix.memory.foreign import EngineShape
from hiradix.memory.hybrid import HybridPools
from hiradix.memory.pools import DevicePool
from hiradix.memory.shape import ArraySpec, SparseMLAShape, StateShape

# What a page consists of, by the attribute of a pool: K and V, latent rows, their scales, an indexer's keys.
_ARRAYS = {
    "k_buffer": "k",
    "v_buffer": "v",
    "kv_buffer": "latent",
    "k_scale_buffer": "k_scale",
    "v_scale_buffer": "v_scale",
    "kv_scale_buffer": "latent_scale",
    "index_k_with_scale_buffer": "index_k",
}
_ADDRESSES = ("k_data_ptrs", "v_data_ptrs", "data_ptrs", "data_strides")
_HELD_BY = {"index_key_cache": "index_k_with_scale_buffer"}  # an object of the pool's that has such an array
# Of a pool of pools: what is looked at on its own, and the map that the allocator keeps.
_INNER = ("full_kv_pool.", "swa_kv_pool.", "mamba_pool.", "full_to_swa_index_mapping")
# Pools whose layers have unlike arrays: of which pools they consist.
_PARTS = ("main_pool", "dense_pool", "index_kv_pool", "index_k_pool")
_LAYERS_OF = {"index_kv_pool": "index_kv_layer_id_mapping", "index_k_pool": "index_k_layer_id_mapping"}
_LAID_OUT = (
    "full_kv_pool",
    "swa_kv_pool",
    *_PARTS,
)  # pools inside others, each in an order of bytes of its own

_SHARDED = "its pages are spread over ranks, each prefix in an order of its own that pages do not carry"
_RECORDS = "its pools are one buffer of records, which the copies would need as planes of their own"
_MOVES = (
    "it moves pages of running requests itself, so a page's place would have to be looked up at each copy"
)
_REQUESTS = (
    "what of it belongs to requests, not to pages, would have to be cached at boundaries as states are"
)
# Classes, and what inherits from them, whose pages do not lie where their slots say.
REFUSED = {
    "NoOpMHATokenToKVPool": "it keeps no KV",
    "PageMajorMHATokenToKVPool": _RECORDS,
    "MiniMaxM3Nvfp4MainKVPool": _RECORDS,
    "MiniMaxM3Nvfp4IndexKPool": _RECORDS,
    "MiniMaxM3Nvfp4KVPool": _RECORDS,
    "UnifiedMHATokenToKVPool": _RECORDS,
    "UnifiedMLATokenToKVPool": _RECORDS,
    "UnifiedHybridLinearKVPool": _RECORDS,
    "UnifiedSWAKVPool": _RECORDS,
    "UnifiedMambaPool": _RECORDS,
    "UnifiedDraftKVPool": _RECORDS,
    "UnifiedDraftSWAKVPool": _RECORDS,
    "UnifiedDraftMambaPool": _RECORDS,
    "HiSparseDSATokenToKVPool": _MOVES,
    "HiSparseMHAMainPool": _MOVES,
    "HiSparseC4DevicePool": _MOVES,
    "LayerSplitDSATokenToKVPool": "each rank has the arrays of some layers, so a page is spread over ranks",
    "PageInterleaveMHATokenToKVPool": _SHARDED,
    "PageInterleaveMLATokenToKVPool": _SHARDED,
    "PageInterleaveDSATokenToKVPool": _SHARDED,
    "DeepSeekV4SingleKVPool": _REQUESTS,
    "DeepSeekV4UniformFP8KVPool": _REQUESTS,
    "DeepSeekV4IndexerPool": _REQUESTS,
    "DeepSeekV4TokenToKVPool": _REQUESTS,
    "QSATokenToKVPool": _REQUESTS,
}


def refuse_class(pool: Any) -> None:
    """Raise ConfigError for a pool of a class, or below one, that addresses its arrays otherwise."""
    for kind in type(pool).__mro__:
        if reason := REFUSED.get(kind.__name__):
            raise _refused(pool, reason)
    for marker in ("layer_shard_enabled", "requires_physical_write_loc", "host_transfer_translate"):
        if getattr(pool, marker, None):
            raise _refused(pool, f"its {marker} says that slots are not where its arrays have them")


def _refused(pool: Any, reason: str) -> ConfigError:
    return ConfigError(
        f"This model's device pool {type(pool).__name__} is not supported by hiradix: {reason}"
    )


def device_pool(kvcache: Any, page_size: int) -> DevicePool:
    """SGLang's pool as ours, over the same memory; ours itself. Raises ConfigError for what cannot be
    described."""
    if isinstance(kvcache, DevicePool):
        return kvcache
    refuse_class(kvcache)
    if parts := [name for name in _PARTS if getattr(kvcache, name, None) is not None]:
        _require_parts(kvcache)
        layers = [layer for name in parts for layer in _layers_of_part(kvcache, name, page_size)]
        return _unlike(layers, page_size)
    buffers = arrays_of(kvcache)
    names = set(buffers)
    if names == {"k", "v"} and hasattr(kvcache, "head_num"):
        num_slots = _num_slots(kvcache, page_size)
        heads, widths = kvcache.head_num, (kvcache.head_dim, kvcache.v_head_dim)
        keys, values = (
            [_as_slots(kvcache, buffer, num_slots, (heads, width)) for buffer in buffers[name]]
            for name, width in zip(("k", "v"), widths, strict=True)
        )
        return DevicePool.wrap(keys, values, page_size)
    if names == {"latent"} and hasattr(kvcache, "kv_lora_rank"):
        return DevicePool.wrap_latent(buffers["latent"], page_size, kvcache.kv_lora_rank)
    if not all(len(buffer) for layers in buffers.values() for buffer in layers):  # some layers lack some
        return _unlike(_layers(kvcache, page_size), page_size)
    cut = {name: [_cut(kvcache, name, b, page_size) for b in layers] for name, layers in buffers.items()}
    specs = tuple(
        _spec(name, layers[0], _is_paged(kvcache, name, layers[0], page_size)) for name, layers in cut.items()
    )
    return DevicePool.wrap_arrays(_shape(kvcache, specs, len(cut[specs[0].name]), page_size), cut, page_size)


def _shape(kvcache: Any, specs: tuple[ArraySpec, ...], num_layers: int, page_size: int) -> Any:
    """An attention's own shape where the arrays are exactly its, so that pages have the same names as ever."""
    rank = getattr(kvcache, "kv_lora_rank", None)
    if rank and specs[0].name == "latent" and rank < specs[0].head_dim:
        width = int(getattr(kvcache, "index_head_dim", 0) or 0)
        own = SparseMLAShape(
            num_layers, rank, specs[0].head_dim - rank, specs[0].dtype, page_size, width or 128,
            packed=rank if getattr(kvcache, "dsa_kv_cache_store_fp8", False) else 0,
        )  # fmt: skip
        if own.arrays == specs:
            return own
    return EngineShape(num_layers, specs, page_size)


def arrays_of(pool: Any) -> dict[str, list[torch.Tensor]]:
    """A layer's tensors of each array of a page, [L], by name. Raises ConfigError for a tensor it knows not."""
    given = dict(_tensors(pool))
    found = {_ARRAYS[name]: tensors for name, tensors in given.items() if name in _ARRAYS}
    if not found:
        raise _refused(pool, "it has none of the arrays that a page is known to have")
    _require_known(pool, given, [tensor for layers in found.values() for tensor in layers])
    ordered = {name: found[name] for name in _ARRAYS.values() if name in found}
    counts = {name: len(layers) for name, layers in ordered.items()}
    if len(set(counts.values())) != 1 or not min(counts.values()):
        raise _refused(pool, f"its arrays have unlike numbers of layers: {counts}")
    return ordered


def _require_known(
    pool: Any, given: Mapping[str, Sequence[torch.Tensor]], arrays: Sequence[torch.Tensor] = ()
) -> None:
    """Raise ConfigError for a tensor that is neither an array of a page nor the same memory as one."""
    known = {tensor.data_ptr() for tensor in arrays}
    for attribute, tensors in given.items():
        if attribute in _ARRAYS or attribute in _ADDRESSES:
            continue
        if any(tensor.numel() and tensor.data_ptr() not in known for tensor in tensors):
            raise _refused(pool, f"its {attribute} is none of the arrays that a page is known to have")


def _tensors(pool: Any) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """All tensors of a pool, by attribute; also of the objects that it keeps them in."""
    for attribute, value in vars(pool).items():
        if attribute in _HELD_BY:
            for inner, held in vars(value).items():
                if tensors := _as_tensors(held):
                    yield (_HELD_BY[attribute] if inner == "buffer" else f"{attribute}.{inner}"), tensors
        elif tensors := _as_tensors(value):
            yield attribute, tensors
        elif hasattr(value, "__dict__") and not isinstance(value, (type, ModuleType)):
            for inner, held in vars(value).items():
                if tensors := _as_tensors(held):
                    yield f"{attribute}.{inner}", tensors


def _as_tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return list(value) if value.dim() > 1 else [value]
    values = value.values() if isinstance(value, Mapping) else value
    if isinstance(values, (str, bytes)) or not isinstance(values, (list, tuple, type({}.values()))):
        return []
    return [tensor for tensor in values if isinstance(tensor, torch.Tensor)]


def _num_slots(kvcache: Any, page_size: int) -> int:
    return (int(kvcache.size) // page_size + 1) * page_size


def _as_slots(kvcache: Any, buffer: torch.Tensor, num_slots: int, slot: tuple[int, int]) -> torch.Tensor:
    """[num_slots, H, D] over a layer's buffer, which may be longer: behind the pool's end there is no memory.

    Layouts other than slot after slot order a page's bytes otherwise (`layout_of`); pages are copied whole.
    """
    width = slot[0] * slot[1]
    if not buffer.is_contiguous() or buffer.numel() % width or buffer.numel() // width < num_slots:
        raise _refused(kvcache, f"its arrays are {tuple(buffer.shape)}, not {num_slots} slots of {slot} each")
    return buffer.view(-1, *slot)[:num_slots]


def _is_paged(kvcache: Any, name: str, buffer: torch.Tensor, page_size: int) -> bool:
    """Whether a buffer has a row for each page, not for each slot."""
    num_slots, rows = _num_slots(kvcache, page_size), buffer.shape[0]
    if num_slots <= rows < num_slots + page_size:
        return False
    if rows * page_size == num_slots:
        return True
    raise _refused(kvcache, f"its {name} has {rows} rows for {num_slots} slots in pages of {page_size}")


def _cut(kvcache: Any, name: str, buffer: torch.Tensor, page_size: int) -> torch.Tensor:
    """The rows of whole pages."""
    if not buffer.is_contiguous():
        raise _refused(kvcache, f"its {name} is not contiguous: {tuple(buffer.shape)}, {buffer.stride()}")
    is_paged = _is_paged(kvcache, name, buffer, page_size)
    return buffer if is_paged else buffer[: _num_slots(kvcache, page_size)]


def _spec(name: str, buffer: torch.Tensor, is_paged: bool) -> ArraySpec:
    heads, width = (1, buffer[0].numel()) if is_paged or buffer.dim() != 3 else buffer.shape[1:]
    return ArraySpec(name, int(heads), int(width), buffer.dtype, per_page=is_paged)


@dataclass(frozen=True)
class _OfLayer:
    """One layer's buffer of one array: whole pages of it. is_paged: a row is a page's. number: the model's."""

    array: str
    buffer: torch.Tensor
    is_paged: bool
    number: int


def _layers(kvcache: Any, page_size: int) -> list[_OfLayer]:
    """Each layer's buffers of each array that it has."""
    refuse_class(kvcache)
    return [
        _OfLayer(
            name,
            _cut(kvcache, name, buffer, page_size),
            _is_paged(kvcache, name, buffer, page_size),
            number,
        )
        for name, layers in arrays_of(kvcache).items()
        for number, buffer in enumerate(layers)
        if len(buffer)
    ]


def _layers_of_part(kvcache: Any, part: str, page_size: int) -> list[_OfLayer]:
    """The layers of a pool inside another, which may have only some of the model's layers."""
    own = {at: number for number, at in getattr(kvcache, _LAYERS_OF.get(part, ""), {}).items()}
    found = _layers(getattr(kvcache, part), page_size)
    return [replace(layer, number=own.get(layer.number, layer.number)) for layer in found]


def _unlike(layers: Sequence[_OfLayer], page_size: int) -> DevicePool:
    """A pool whose layers have unlike arrays: one layer, with an array for each of theirs. A layer of
    theirs is there when all of a load is."""
    specs, buffers = [], {}
    for at, layer in enumerate(layers):
        specs.append(_spec(f"{layer.array}.{at}", layer.buffer, layer.is_paged))
        buffers[specs[-1].name] = [layer.buffer]
    shape = EngineShape(1, tuple(specs), page_size, tuple(layer.number for layer in layers))
    return DevicePool.wrap_arrays(shape, buffers, page_size)


def _require_parts(kvcache: Any) -> None:
    """Raise ConfigError where a pool of pools has tensors of its own, or other pools."""
    for attribute, value in vars(kvcache).items():
        is_pool = hasattr(value, "get_key_buffer") and attribute not in _PARTS
        if is_pool or any(tensor.numel() for tensor in _as_tensors(value)):
            raise _refused(kvcache, f"its {attribute} is none of the pools that it is known to have")


def layout_of(kvcache: Any) -> str:
    """The page layout of the pool and of the pools inside it, as a suffix for names; "" if all are slot after
    slot."""
    layout = getattr(kvcache, "kv_cache_layout", "nhd")
    inside = {name: layout_of(getattr(kvcache, name, None)) for name in _LAID_OUT if hasattr(kvcache, name)}
    own = "" if layout == "nhd" else f":{layout}"
    return own + "".join(f":{name}{given}" for name, given in inside.items() if given)


def window_pools(kvcache: Any) -> HybridPools:
    """SGLang's pool of full and sliding-window layers as two of ours."""
    refuse_class(kvcache)
    lacking = [
        name
        for name in ("page_size", "layers_mapping", "full_kv_pool", "swa_kv_pool")
        if not hasattr(kvcache, name)
    ]
    if lacking:
        raise _refused(kvcache, f"it has no {' and no '.join(lacking)}, so it is no pool of windows")
    _require_known(kvcache, {name: t for name, t in _tensors(kvcache) if not name.startswith(_INNER)})
    size = kvcache.page_size
    layers: tuple[dict[int, int], dict[int, int]] = ({}, {})  # model layer by the pool's layer
    for layer, (own, is_window) in kvcache.layers_mapping.items():
        layers[is_window][own] = layer
    full, window = ([of[own] for own in sorted(of)] for of in layers)
    return HybridPools(
        _of_layers(kvcache, "full_kv_pool", size, full),
        _of_layers(kvcache, "swa_kv_pool", size, window),
        full,
        window,
    )


def state_pools(kvcache: Any, requests: Any, page_size: int) -> HybridPools:
    """SGLang's pool of full attention and the request pool's recurrent states as two of ours."""
    refuse_class(kvcache)
    layers = getattr(kvcache, "full_attention_layer_id_mapping", None)
    states = getattr(requests, "mamba_pool", None)
    if not hasattr(kvcache, "full_kv_pool") or layers is None or states is None:
        raise _refused(kvcache, f"with {type(requests).__name__} it is no pool of attention beside states")
    _require_known(kvcache, {name: t for name, t in _tensors(kvcache) if not name.startswith(_INNER)})
    full = sorted(layers, key=layers.__getitem__)
    attention = _of_layers(kvcache, "full_kv_pool", page_size, full)
    return HybridPools(attention, state_pool(states), full, states.mamba_layer_ids)


def _of_layers(kvcache: Any, name: str, page_size: int, layers: Sequence[int]) -> DevicePool:
    """A pool inside another, with an array for each of these layers of the model: each is loaded by itself."""
    pool = device_pool(getattr(kvcache, name), page_size)
    if pool.shape.num_layers != len(layers):
        raise _refused(
            kvcache, f"of the {len(layers)} layers in its {name} some lack arrays that others have"
        )
    return pool


def state_pool(states: Any) -> DevicePool:
    """SGLang's recurrent states as a pool of records: the convolutions' tails, then the state of each layer.

    Raises ConfigError where a slot has more than these: what is not recorded would be stale.
    """
    refuse_class(states)
    cache = states.mamba_cache
    extra = [
        name for name, value in vars(cache).items() if name not in ("conv", "temporal") and value is not None
    ]
    if extra:
        raise _refused(states, f"its {extra[0]} (speculative decoding, replay) goes with running requests")
    if siblings := [type(sibling).__name__ for sibling in getattr(states, "_slot_siblings", ())]:
        raise _refused(
            states, f"its slots have {siblings[0]} beside them, which would be records of their own"
        )
    tails = [_dense(states, f"conv {number}", tail) for number, tail in enumerate(cache.conv)]
    temporal = _dense(states, "temporal", cache.temporal) if cache.temporal.numel() else None
    num_layers = len(states.mamba_layer_ids)
    buffers = [*tails, *([temporal] if temporal is not None else [])]
    _require_known(states, dict(_tensors(states)), [row for rows in buffers for row in rows])
    if len(tails) == 1 and tails[0][0].dim() == 3:
        shape: Any = _state_shape(num_layers, tails[0][0], None if temporal is None else temporal[0])
        names = [spec.name for spec in shape.arrays]
    else:
        names = [*(f"conv{number}" for number in range(len(tails))), "ssm"][: len(buffers)]
        specs = [_state_spec(name, rows[0]) for name, rows in zip(names, buffers, strict=True)]
        shape = EngineShape(num_layers, tuple(specs), 1)
    return DevicePool.wrap_arrays(shape, dict(zip(names, buffers, strict=True)), 1)


def _state_shape(num_layers: int, tail: torch.Tensor, temporal: torch.Tensor | None) -> StateShape:
    """The shape of a layer's tails [slots, dim, width] and states [slots, ...], if any, with axes as they lie
    in memory: a machine that keeps them in another order has another name."""
    dim, width = tail.shape[1:]
    if temporal is None:
        return StateShape(num_layers, dim, width, conv_dtype=tail.dtype)
    heads, head_dim = (*temporal.shape[1:3], 1)[:2]
    rest = temporal[0].numel() // (heads * head_dim)
    return StateShape(num_layers, dim, width, heads, head_dim, rest, tail.dtype, temporal.dtype)


def _state_spec(name: str, rows: torch.Tensor) -> ArraySpec:
    """The spec of a layer's [slots, ...], with axes as they lie in memory."""
    return ArraySpec(name, int(rows.shape[1]), rows[0, 0].numel(), rows.dtype, per_page=True)


def _dense(states: Any, name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
    """[L] of a state's rows as they lie in memory, whatever order their axes have."""
    rows = []
    for layer in tensor:
        inner = sorted(range(1, layer.dim()), key=lambda axis: (-layer.stride(axis), -layer.shape[axis]))
        dense = layer.permute(0, *inner)
        if not dense.is_contiguous():
            raise _refused(states, f"its {name} is not dense: {tuple(layer.shape)}, {layer.stride()}")
        rows.append(dense)
    return rows
