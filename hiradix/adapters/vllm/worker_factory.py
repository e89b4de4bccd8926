"""The worker role from vLLM's configuration and KV caches: pools, sizes, the store's fingerprint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hiradix.adapters.rope import LONG, lengths_that_decide, unfixed
from hiradix.adapters.vllm.layout import (
    STATES,
    Blocks,
    Grouping,
    Interior,
    Latent,
    StateTensors,
    group_layers,
    layer_numbers,
    layer_order,
    looks_back,
    pool_of,
    shape_of,
    states_of,
)
from hiradix.adapters.vllm.names import local_place, names_are_hub
from hiradix.adapters.vllm.orders import WorkerFacts
from hiradix.adapters.vllm.settings import Settings
from hiradix.adapters.vllm.switch import OpenStorage
from hiradix.adapters.vllm.worker import WorkerRole
from hiradix.config import ExtraConfig
from hiradix.memory import HostPool, StridedPool, make_transport, size_host_pools
from hiradix.memory.compare import BEHIND_OTHERS
from hiradix.memory.shape import CacheShape, page_bytes
from hiradix.prefix_cache import (
    ModelIdentity,
    component_name,
    origin_of,
    repository_of,
    run_with,
    stored_pages,
)
from hiradix.prefix_cache.identity import STATE_NAME
from hiradix.prefix_cache.weight_files import CONFIG_NAME, weights_digest
from hiradix.storage import Stores, StoreSettings, Trust, open_stores, trust_of, trusted_stores
from hiradix.transfer import PoolPair

_OF_NO_KV = ("_name_or_path", "transformers_version")  # in a model's config
# Of a folder that has safetensors these read the same; others say which files count, or read other places.
_USUAL_FORMATS = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer")
_LONG_LLAMA4 = 32768
_FP8 = {"fp8": "fp8_e4m3"}  # names of one type; the type of the memory is not told by its tensors


@dataclass(frozen=True)
class KVGroup:
    """One of vLLM's KV cache groups: its spec and the names of its layers."""

    spec: Any
    layers: Sequence[str]


@dataclass(frozen=True)
class WorkerPlan:
    """The arguments that a worker is built from. model: this rank's; num_ranks: workers that share this
    host's memory."""

    settings: Settings
    grouping: Grouping
    groups: Sequence[KVGroup]
    num_blocks: int
    latent: Latent | None
    model: ModelIdentity
    num_ranks: int
    interior: Interior = Interior.TOKENS


@dataclass(frozen=True)
class BuiltWorker:
    """The role, what its scheduler must know, and each layer's number for the gate."""

    role: WorkerRole
    facts: WorkerFacts
    layer_numbers: Mapping[str, int]


def identity_of(config: Any, name: str, dtype: str | None = None) -> ModelIdentity:
    """Whose pages a VllmConfig's model computes: the model's name and its weights, and how they are run.

    Weights are those that vLLM takes for the model's path: of a folder or file, or of the snapshot that a
    hub's name stands for, what is in the files; of object storage the path, and the config that was pulled.
    What is told of how they are run: options that give the same weights other KV than their files ask for.
    dtype: of the KV cache.
    """
    model = config.model_config
    remote = getattr(model, "model_weights", None)
    wanted = getattr(model.revision, "resolved", None) or model.revision  # a branch as it was when it loaded
    cache_dir = getattr(config.load_config, "download_dir", None)
    place = local_place(str(model.model), wanted, cache_dir)
    revision = origin_of(place, wanted, cache_dir, is_hub=names_are_hub()).revision
    if remote and remote != model.model:
        pulled = Path(model.model)
        revision = f"{remote}:{weights_digest(str(pulled), CONFIG_NAME) if pulled.is_dir() else wanted}"
    return run_with(ModelIdentity(name or model_name(config), revision), _otherwise(config, dtype))


def model_name(config: Any) -> str:
    """The default name of a model: the last part of its path, or of its repository's name on the hub."""
    path = str(config.model_config.model).rstrip("/")
    repository = repository_of(Path(path))
    return (repository[0] if repository else path).rpartition("/")[2]


def _otherwise(config: Any, dtype: str | None) -> dict[str, Any]:
    model, cache_dtype = config.model_config, config.cache_config.cache_dtype
    is_changed = model.hf_overrides or (model.hf_config_path and model.hf_config_path != model.model)
    seen = model.hf_config.to_dict() if is_changed else {}
    load, text = config.load_config, getattr(model, "hf_text_config", None)
    is_usual = load.load_format in _USUAL_FORMATS
    computed_in, images = str(getattr(model, "dtype", dtype)), getattr(model, "multimodal_config", None)
    return {
        "config": {key: value for key, value in seen.items() if key not in _OF_NO_KV},
        "quantization": model.quantization,
        "quantization_config": model.quantization_config and str(model.quantization_config),
        "cache_dtype": _FP8.get(cache_dtype, cache_dtype) if cache_dtype.startswith("fp8") else None,
        "load_format": None if is_usual else load.load_format,
        "model_loader_extra_config": None if is_usual else getattr(load, "model_loader_extra_config", None),
        "dtype": computed_in if dtype is not None and computed_in != dtype else None,
        "code_revision": getattr(model, "code_revision", None),
        "mm_processor_kwargs": getattr(images, "mm_processor_kwargs", None),
        "rope": _rope(text, getattr(model, "max_model_len", None)),
        "attn_temperature_tuning": _tunes_by_length(model, text),
    }


def _rope(text: Any, max_model_len: int | None) -> dict[str, Any]:
    """The properties of a rope that depend on `max_model_len`. With `longrope` vLLM takes the long factors
    for every sequence if --max-model-len exceeds what the short ones are for."""
    lengths: dict[str, Any] = dict(lengths_that_decide(text))
    if max_model_len is not None and unfixed(text, max_model_len, (LONG,)):
        lengths["factors"] = "long"
    return lengths


def _tunes_by_length(model: Any, text: Any) -> bool | None:
    """Whether Llama 4's queries are scaled by position: with long contexts, unless told otherwise."""
    if not str(getattr(text, "model_type", "")).startswith("llama4"):
        return None
    given = dict(model.try_get_generation_config()) | dict(model.override_generation_config or {})
    return bool(given.get("attn_temperature_tuning", model.max_model_len > _LONG_LLAMA4))


def build_worker(plan: WorkerPlan, caches: Mapping[str, torch.Tensor]) -> BuiltWorker:
    """Allocates the host pools, starts the threads, attaches storage. Raises ConfigError naming the key."""
    config, order = plan.settings.cache, layer_order(list(caches))
    parts = [plan.groups[number] for number in plan.grouping.groups]
    shapes = [shape_of(part.spec, len(part.layers), plan.latent) for part in parts]
    sizes = [1 if isinstance(shape, StateTensors) else plan.grouping.page_size for shape in shapes]
    all_bytes = [page_bytes(shape, size) for shape, size in zip(shapes, sizes, strict=True)]
    counts = size_host_pools(all_bytes, [plan.num_blocks] * len(parts), config, plan.num_ranks)
    pairs, hosts = [], []
    for part, shape, size, num_pages in zip(parts, shapes, sizes, counts, strict=True):
        device = _device_pool(plan, shape, [caches[name] for name in layer_order(part.layers)])
        host = HostPool(shape, num_pages, size, layout=config.hicache_mem_layout, device=device.device)
        transport = make_transport(config.hicache_io_backend, device.device, (device, host))
        hosts.append(host)
        pairs.append(PoolPair(device, host, transport, group_layers(order, part.layers, caches)))
    names = _stored_as(plan, [pair.model_layers for pair in pairs])
    stage = BEHIND_OTHERS if plan.model.pp_rank else 0
    layers = [[stage + layer for layer in pair.model_layers] for pair in pairs]
    role = WorkerRole(pairs, _storage_opener(plan, hosts, names, layers))
    if config.hicache_storage_backend is not None:
        try:
            role.attach(config.hicache_storage_backend, config.hicache_storage_backend_extra_config.opening)
        except BaseException:
            role.close(0.0)
            raise
    facts = WorkerFacts(tuple(counts), tuple(all_bytes), role.has_storage)
    return BuiltWorker(role, facts, {name: number for number, name in enumerate(order)})


def _device_pool(plan: WorkerPlan, shape: CacheShape, caches: Sequence[torch.Tensor]) -> StridedPool:
    if isinstance(shape, StateTensors):
        return states_of(shape, plan.num_blocks, caches)
    return pool_of(shape, Blocks(plan.grouping.page_size, plan.num_blocks, plan.interior), caches)


def _stored_as(plan: WorkerPlan, layers_of: Sequence[Sequence[int]]) -> list[str]:
    """Each component's name in storage: its kind, as in every engine, if there is one group of that kind.

    vLLM cuts layers of one kind into groups as it sees fit: where there are several, their layers say which.
    In a pipeline its stages' layers do too, by the model's numbers: VLLM_PP_LAYER_PARTITION cuts elsewhere.
    """
    parts = [plan.groups[number] for number in plan.grouping.groups]
    kinds = [_kind_of(part.spec) if len(parts) > 1 else component_name(None) for part in parts]
    is_cut = plan.model.pp_size > 1
    numbers = [
        layer_numbers(part.layers) if is_cut else own for part, own in zip(parts, layers_of, strict=True)
    ]
    return [
        kind if kinds.count(kind) == 1 and not is_cut else f"{kind or 'full'}-layers-{_listed(layers)}"
        for kind, layers in zip(kinds, numbers, strict=True)
    ]


def _kind_of(spec: Any) -> str:
    """The name in storage of a group's pages if there are other groups, none of the same kind."""
    kind = type(spec).__name__
    if kind == STATES:
        return f"{STATE_NAME}-{getattr(spec.mamba_type, 'name', spec.mamba_type).lower()}"
    tokens = looks_back(spec)
    return f"chunk-{tokens}" if kind == "ChunkedLocalAttentionSpec" else component_name(tokens)


def _listed(layers: Sequence[int]) -> str:
    return "-".join(map(str, layers))


def _storage_opener(
    plan: WorkerPlan, hosts: Sequence[HostPool], names: Sequence[str], layers: Sequence[Sequence[int]]
) -> OpenStorage:
    """Opens a store for the pages of all components, as the host pools have them. layers: of the model."""
    layout = plan.settings.cache.hicache_mem_layout
    if plan.interior is Interior.OWN:
        layout += "+kernel"  # pages that only the same kernel understands

    remembered: dict[Any, Any] = {}
    labels = [""]

    def open_it(name: str, keys: Mapping[str, Any], label: str) -> Stores:
        if label != labels[0]:
            labels[0] = label
            remembered.clear()
        model = run_with(plan.model, {"label": label})
        pages = [
            stored_pages(model, host, layout, own, plan.grouping.page_size, numbers)
            for host, own, numbers in zip(hosts, names, layers, strict=True)
        ]
        extra = ExtraConfig.from_mapping(keys)
        identity = extra.storage_identity or plan.settings.cache.hicache_storage_identity
        settings = StoreSettings.read(extra.backend)
        trust = trust_of(name, settings, Trust(identity, remembered=remembered))
        stores = open_stores(name, settings, pages, required=bool(extra.hicache_storage_required))
        return trusted_stores(stores, pages, trust)

    return open_it
