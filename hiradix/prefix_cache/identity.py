"""Names the model that pages belong to: from the engine's account of its weights, to the fingerprint in
storage."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hiradix.memory import CacheShape, HostPool, MLAShape
from hiradix.memory.compare import PageComparer
from hiradix.prefix_cache.weight_files import origin_of
from hiradix.storage import ComponentPages, PageFingerprint

STATE_NAME = "state"  # what storage calls records of recurrent state


@dataclass(frozen=True)
class ModelIdentity:
    """Everything that makes one model's KV different from another's; part of every storage key.

    model_id: name or digest of the weights. revision: of the weights, when known.
    """

    model_id: str
    revision: str = ""
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1


def model_identity(path: str, name: str) -> ModelIdentity:
    """The model's name and a digest of its config and weights, for storage keys. Reads them: `origin_of`."""
    return ModelIdentity(model_id=name, revision=origin_of(path).revision)


def run_with(model: ModelIdentity, options: Mapping[str, Any]) -> ModelIdentity:
    """The same weights computed with another way than their files ask for, which gives other KV.

    options: as JSON has them, by name; those that are not set (None or empty) make no difference.
    """
    given = {name: value for name, value in options.items() if value}
    if not given:
        return model
    text = json.dumps(given, sort_keys=True, default=str)
    return replace(model, revision=f"{model.revision}+{hashlib.sha256(text.encode()).hexdigest()[:32]}")


def page_fingerprint(
    model: ModelIdentity, shape: CacheShape, page_size: int, layout: str, component: str = ""
) -> PageFingerprint:
    """The fingerprint of pages of `shape` in a host pool of `layout`: the same in every engine set alike.

    component: which of the model's pools it is; "" for full attention.
    """
    return PageFingerprint(
        model_id=model.model_id,
        revision=model.revision,
        dtype=str(shape.dtype).removeprefix("torch."),
        layout=layout,
        page_size=page_size,
        tp_rank=model.tp_rank,
        tp_size=model.tp_size,
        pp_rank=model.pp_rank,
        pp_size=model.pp_size,
        shape=shape.numbers(),
        component=component,
    )


def stored_pages(
    model: ModelIdentity,
    pool: HostPool,
    layout: str,
    component: str = "",
    page_size: int | None = None,
    layers: Sequence[int] | None = None,
) -> ComponentPages:
    """A host pool's pages as they are described to storage, with their `page_fingerprint`.

    Pages that all tensor parallel ranks have alike are no rank's. page_size: tokens of the pages that name
    what the pool has, where that is a record. layers: the model's number of each of the pool's.
    """
    if is_replicated(pool):
        model = replace(model, tp_rank=0, tp_size=1)
    mark = page_fingerprint(model, pool.shape, page_size or pool.page_size, layout, component)
    compare = PageComparer(pool.shape, pool.layout.name, pool.page_size, layers)
    return ComponentPages(
        mark, pool.page_bytes, pool.page_bytes * pool.num_pages, _elements(pool.shape), compare
    )


def _elements(shape: CacheShape) -> str:
    """The one type of all that a page of KV has, "" if there are several, and of recurrent states."""
    types = {spec.dtype for spec in shape.arrays}
    if len(types) > 1 or any(spec.per_page for spec in shape.arrays):
        return ""
    return str(types.pop()).removeprefix("torch.")


def is_replicated(pool: HostPool) -> bool:
    """Whether tensor parallel ranks have the same pages."""
    return isinstance(pool.shape, MLAShape)


def component_name(window_tokens: int | None) -> str:
    """The name in storage of the component with a sliding window of `window_tokens`; None: full attention."""
    return "" if window_tokens is None else f"window-{window_tokens}"
