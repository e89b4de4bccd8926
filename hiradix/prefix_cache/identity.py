"""Which model's pages these are: what an engine says of its weights, and the fingerprint storage keeps."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from hiradix.memory import CacheShape, HostPool, MLAShape
from hiradix.memory.compare import PageComparer
from hiradix.storage import ComponentPages, PageFingerprint

STATE_NAME = "state"  # what storage calls records of recurrent state
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_HEAD_BYTES = 1 << 20
_PIECE_BYTES = 4096
_NUM_PIECES = 1024  # of a file that does not say where its tensors are
_HEADER_BYTES = 100_000_000  # safetensors' own limit
_NUM_READERS = 16  # threads that wait for a far disk


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
    """The model's name and a digest of its config and weights, for storage keys."""
    return ModelIdentity(model_id=name, revision=weights_digest(path, "config.json"))


def run_with(model: ModelIdentity, options: Mapping[str, Any]) -> ModelIdentity:
    """The same weights computed with another way than their files ask for, which gives other KV.

    options: as JSON has them, by name; those that are not set (None or empty) make no difference.
    """
    given = {name: value for name, value in options.items() if value}
    if not given:
        return model
    text = json.dumps(given, sort_keys=True, default=str)
    return replace(model, revision=f"{model.revision}+{hashlib.sha256(text.encode()).hexdigest()[:32]}")


def weights_digest(path: str, config_name: str) -> str:
    """32 hex digits of a folder's config file, and of its weight files' names, sizes and what is in them.

    Of each its first MiB and a piece from the middle of every tensor, so that what was trained further, or
    had an adapter merged into it, is other weights. Where a file does not say where its tensors are, pieces
    are spread over it. Reads some KiB per tensor, of several files at once: folders may be far away.
    """
    files = [
        file
        for file in sorted(Path(path).iterdir())
        if (file.name == config_name or file.suffix in _WEIGHTS) and file.is_file()
    ]
    with ThreadPoolExecutor(_NUM_READERS) as readers:
        return hashlib.sha256(b"".join(readers.map(_file_digest, files))).hexdigest()[:32]


def _file_digest(file: Path) -> bytes:
    size = file.stat().st_size
    digest = hashlib.sha256(f"{file.name} {size}\n".encode())
    with file.open("rb") as stream:
        digest.update(stream.read(_HEAD_BYTES))
        for middle in _middles(stream, size):
            stream.seek(max(0, middle - _PIECE_BYTES // 2))
            digest.update(stream.read(_PIECE_BYTES))
    return digest.digest()


def _middles(stream: BinaryIO, size: int) -> list[int]:
    """Where in a weight file to look: the middle of each tensor, or evenly spaced places."""
    if size <= _HEAD_BYTES:
        return []  # has been read whole
    try:
        stream.seek(0)
        length = int.from_bytes(stream.read(8), "little")
        header: Any = json.loads(stream.read(length)) if length <= _HEADER_BYTES else None
        spans = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
        found = sorted(8 + length + (int(begin) + int(end)) // 2 for begin, end in spans)
        if found and 0 <= found[0] and found[-1] < size:
            return found
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        pass
    return [size * n // _NUM_PIECES for n in range(_NUM_PIECES)]


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
    """What storage is told of a host pool's pages, as `page_fingerprint`.

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
    """What storage calls the pages of a sliding window of so many tokens; None: of full attention."""
    return "" if window_tokens is None else f"window-{window_tokens}"
