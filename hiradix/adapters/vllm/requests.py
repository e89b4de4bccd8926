"""The scheduler role's record of each request, and the key of its tokens."""

from __future__ import annotations

import hashlib
import logging
import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from hiradix.adapters.vllm.names import local_place, names_are_hub
from hiradix.errors import Misuse
from hiradix.policy.uses import Finished
from hiradix.prefix_cache import origin_of
from hiradix.prefix_cache.weight_files import decides, hub_snapshot
from hiradix.transfer import Ticket
from hiradix.tree import RadixKey, TokenLog
from hiradix.tree.key import ADAPTER

logger = logging.getLogger(__name__)

ADAPTER_CONFIG = "adapter_config.json"


class EngineRequest(Protocol):
    """vLLM's Request, as far as it is read here."""

    request_id: str
    num_computed_tokens: int
    cache_salt: str | None
    lora_request: Any
    mm_features: Sequence[Any]
    prompt_embeds: Any
    prompt_token_ids: Sequence[int] | None
    resumable: bool
    skip_reading_prefix_cache: bool
    block_hashes: Sequence[bytes]

    @property
    def all_token_ids(self) -> Sequence[int]: ...

    @property
    def num_tokens(self) -> int: ...


@dataclass(eq=False)
class Tracked:
    """One request from its arrival to its end.

    local_tokens: what vLLM's own prefix cache had at the last lookup. num_saved: leading pages of its block
    table that are saved or need not be. loads: its loads under way. waiting_since: when it was first told to
    ask again, None if it was not. is_stale: what it has computed so far was so before a reset or a forget.
    is_promised: a lookup has promised it pages that vLLM has not taken up. has_blocks: vLLM has given it blocks
    since it began. gated: pages that a lookup has last weighed against computing them, and whether they are
    worth loading. is_explained: see `explained`.
    """

    request: EngineRequest
    log: TokenLog
    extras: tuple[bytes | None, ...] | None
    local_tokens: int = 0
    num_saved: int = 0
    loads: set[Ticket] = field(default_factory=set)
    waiting_since: float | None = None
    is_stale: bool = False
    is_promised: bool = False
    has_blocks: bool = False
    gated: tuple[int, bool] = (0, False)
    is_explained: bool = False

    @property
    def has_begun(self) -> bool:
        """Whether some of it may be computed already. vLLM counts a step's tokens after it has told of their
        blocks, and those of a late load before."""
        return self.has_blocks or self.request.num_computed_tokens > 0

    def key(self, num_pages: int, page_size: int) -> RadixKey:
        """The key of the request's first pages; its tokens must be known that far."""
        known = len(self.log)
        if known < num_pages * page_size:
            self.log.extend(self.request.all_token_ids[known : self.request.num_tokens])
        key = self.log.key(num_pages * page_size)
        if len(key) != num_pages * page_size:
            raise Misuse(f"{len(key)} tokens known of {num_pages} pages")
        key.extras = self.extras
        return key

    def ended(self) -> Finished:
        """The facts a policy learns from a request that has ended: the lengths of its prompt and its answer."""
        tokens = self.request.prompt_token_ids
        if tokens is None:
            raise Misuse("a request without tokens is not tracked")
        return Finished(len(tokens), self.request.num_tokens - len(tokens))


def track(request: EngineRequest, page_size: int) -> Tracked | None:
    """A record for a request, or None for one whose pages its tokens do not name, nor its adapter's files.

    BadNamespace: its salt is no text.
    """
    if request.prompt_embeds is not None or request.prompt_token_ids is None or request.resumable:
        return None
    try:
        adapter = _adapter(request.lora_request)
    except AdapterChanged:
        return None
    except OSError as error:
        logger.warning(
            "request %s: its adapter cannot be read, nothing is cached: %s", request.request_id, error
        )
        return None
    log = TokenLog((), adapter, cache_salt=request.cache_salt)
    return Tracked(request, log, _page_extras(request.mm_features, page_size))


def _adapter(lora: Any) -> str | None:
    """The name of an adapter in every process: made of its name and its weights, not vLLM's number for it.

    AdapterChanged: which weights vLLM computes with is not known.
    """
    if lora is None:
        return None
    path = str(lora.lora_path)
    if path.startswith("~"):  # as vLLM does
        path = os.path.expanduser(path)
    if lora.load_inplace:
        digest = _adapter_digest(path, lora.lora_int_id, _files(path))
    else:
        digest = _as_loaded(path, lora.lora_int_id).digest()
    shape = " 3d" if getattr(lora, "is_3d_lora_weight", False) else ""
    return f"{ADAPTER}{lora.lora_name}@{digest}{shape}"


class AdapterChanged(Exception):
    """Files of an adapter are others than when it was first used."""


class _AsLoaded:
    """An adapter that vLLM has loaded as one number, by its weights when it was first used.

    vLLM drops adapters that it has no room for, and reads them again with the next request: what is in the
    files then counts for it, and nobody is told. So once they have changed, nobody knows.
    """

    def __init__(self, path: str, load: int) -> None:
        self._path, self._load = path, load
        self._files = _files(path)
        self._digest = _adapter_digest(path, load, self._files)
        self._has_changed = False

    def digest(self) -> str:
        """Looks at sizes and times of the files, and reads them where these are others."""
        files = _files(self._path)
        if not self._has_changed and files != self._files:
            self._has_changed = _adapter_digest(self._path, self._load, files) != self._digest
            self._files = files
            if self._has_changed:
                logger.warning(
                    "adapter %s has changed, and vLLM was not told to load it again: nothing of it is cached",
                    self._path,
                )
        if self._has_changed:
            raise AdapterChanged(self._path)
        return self._digest


@lru_cache(maxsize=1024)
def _as_loaded(path: str, load: int) -> _AsLoaded:
    return _AsLoaded(path, load)


def _files(path: str) -> tuple[tuple[str, int, int], ...]:
    """The state of an adapter's files; it changes when they are replaced."""
    folder = _folder(path)
    if folder is None:
        return ()
    files = (file for file in sorted(folder.iterdir()) if decides(file, ADAPTER_CONFIG))
    stats = ((str(file), file.stat()) for file in files)
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def _folder(path: str) -> Path | None:
    """The folder that vLLM takes an adapter's path for, which may be a name of the hub."""
    place = Path(local_place(path))
    if place.is_dir():
        return place
    return hub_snapshot(path) if names_are_hub() else None


@lru_cache(maxsize=1024)
def _adapter_digest(path: str, _load: int, _as_of: tuple[tuple[str, int, int], ...]) -> str:
    """A digest of all weights of the adapter that vLLM has loaded as number `_load`; for weights that are in
    no folder here, a name that no other process has."""
    folder = _folder(path)
    return uuid.uuid4().hex if folder is None else origin_of(str(folder), config_name=ADAPTER_CONFIG).revision


def _page_extras(features: Sequence[Any], page_size: int) -> tuple[bytes | None, ...] | None:
    """Per page a digest of the inputs behind its placeholder tokens and where in them it begins."""
    digests: dict[int, Any] = {}
    for feature in features:
        begin, length = feature.mm_position.offset, feature.mm_position.length
        for page in range(begin // page_size, (begin + length - 1) // page_size + 1):
            name = feature.identifier  # any text: with its length, so that it is not taken for two
            text = f"{len(name)} {name} {begin - page * page_size} {length}\n"
            digests.setdefault(page, hashlib.sha256()).update(text.encode())
    if not digests:
        return None
    return tuple(digests[page].digest() if page in digests else None for page in range(max(digests) + 1))
