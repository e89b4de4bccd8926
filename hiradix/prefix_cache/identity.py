"""Which model's pages these are: what an engine says of its weights, and the fingerprint storage keeps."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

from hiradix.memory import CacheShape, HostPool, MLAShape
from hiradix.storage import ComponentPages, PageFingerprint

STATE_NAME = "state"  # what storage calls records of recurrent state
_DIGEST_BYTES = 1 << 20


@dataclass(frozen=True)
class ModelIdentity:
    """What makes one model's KV different from another's; part of every storage key.

    model_id: name or digest of the weights. revision: of the weights, when known.
    """

    model_id: str
    revision: str = ""
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1


def model_identity(path: str, name: str) -> ModelIdentity:
    """The model's name and a digest of its config and weight files' sizes and heads, for storage keys."""
    return ModelIdentity(model_id=name, revision=weights_digest(path, "config.json"))


def weights_digest(path: str, config_name: str) -> str:
    """32 hex digits of a folder's config file and of its weight files' sizes and first MiB each."""
    digest = hashlib.sha256()
    for file in sorted(Path(path).iterdir()):
        if file.name == config_name or file.suffix == ".safetensors":
            digest.update(f"{file.name} {file.stat().st_size}\n".encode())
            with file.open("rb") as stream:
                digest.update(stream.read(_DIGEST_BYTES))
    return digest.hexdigest()[:32]


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
    model: ModelIdentity, pool: HostPool, layout: str, component: str = "", page_size: int | None = None
) -> ComponentPages:
    """What storage is told of a host pool's pages, as `page_fingerprint`.

    Pages that all tensor parallel ranks have alike are no rank's. page_size: tokens of the pages that name
    what the pool has, where that is a record.
    """
    if is_replicated(pool):
        model = replace(model, tp_rank=0, tp_size=1)
    mark = page_fingerprint(model, pool.shape, page_size or pool.page_size, layout, component)
    return ComponentPages(mark, pool.page_bytes, pool.page_bytes * pool.num_pages)


def is_replicated(pool: HostPool) -> bool:
    """Whether tensor parallel ranks have the same pages."""
    return isinstance(pool.shape, MLAShape)


def component_name(window_tokens: int | None) -> str:
    """What storage calls the pages of a sliding window of so many tokens; None: of full attention."""
    return "" if window_tokens is None else f"window-{window_tokens}"
