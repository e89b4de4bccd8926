"""Which model's pages these are: what an engine says of its weights, and the fingerprint storage keeps."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from hiradix.memory import CacheShape
from hiradix.storage import PageFingerprint

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
