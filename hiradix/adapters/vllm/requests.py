"""What the scheduler role knows of each request, and the key its tokens spell."""

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

from hiradix.adapters.vllm.names import names_are_hub
from hiradix.adapters.vllm.orders import Ticket
from hiradix.errors import BadNamespace, Misuse
from hiradix.policy.uses import Finished
from hiradix.prefix_cache import origin_of
from hiradix.prefix_cache.weight_files import hub_snapshot
from hiradix.tree import Lock, RadixKey, TokenLog
from hiradix.tree.key import ADAPTER

logger = logging.getLogger(__name__)

ADAPTER_CONFIG = "adapter_config.json"


class EngineRequest(Protocol):
    """What is read of vLLM's Request."""

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
    table that are saved or need not be. hold: keeps prefetched pages until they are loaded or given up.
    fetch: its prefetch under way. loads: its loads under way. waiting_since: when it was first told to ask
    again, None if it was not. is_stale: what it has computed so far was so before a reset.
    """

    request: EngineRequest
    log: TokenLog
    extras: tuple[bytes | None, ...] | None
    local_tokens: int = 0
    num_saved: int = 0
    hold: Lock | None = None
    fetch: Ticket | None = None
    loads: set[Ticket] = field(default_factory=set)
    waiting_since: float | None = None
    is_stale: bool = False

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
        """What a policy may learn from a request that has ended: how long its prompt and its answer were."""
        tokens = self.request.prompt_token_ids
        if tokens is None:
            raise Misuse("a request without tokens is not tracked")
        return Finished(len(tokens), self.request.num_tokens - len(tokens))


def track(request: EngineRequest, page_size: int) -> Tracked | None:
    """A record for a request, or None for one whose pages its tokens do not name, nor its adapter's files."""
    if request.prompt_embeds is not None or request.prompt_token_ids is None or request.resumable:
        return None
    try:
        adapter = _adapter(request.lora_request)
    except OSError as error:
        logger.warning(
            "request %s: its adapter cannot be read, nothing is cached: %s", request.request_id, error
        )
        return None
    try:
        log = TokenLog((), adapter, cache_salt=request.cache_salt)
    except BadNamespace as error:
        logger.warning("request %s: nothing is cached: %s", request.request_id, error)
        return None
    return Tracked(request, log, _page_extras(request.mm_features, page_size))


def _adapter(lora: Any) -> str | None:
    """What names an adapter in every process: its name and its weights, not vLLM's number for it."""
    if lora is None:
        return None
    path = str(lora.lora_path)
    if path.startswith("~"):  # as vLLM does
        path = os.path.expanduser(path)
    digest = _adapter_digest(path, lora.lora_int_id, _files(path, lora.load_inplace))
    shape = " 3d" if getattr(lora, "is_3d_lora_weight", False) else ""
    return f"{ADAPTER}{lora.lora_name}@{digest}{shape}"


def _files(path: str, is_reloaded: bool) -> tuple[tuple[str, int, int], ...]:
    """Of an adapter that vLLM reads anew for each step, what would tell that its files were replaced."""
    folder = _folder(path) if is_reloaded else None
    if folder is None:
        return ()
    stats = ((str(file), file.stat()) for file in sorted(folder.iterdir()))
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def _folder(path: str) -> Path | None:
    """The folder that vLLM takes an adapter's path for, which may be a name of the hub."""
    if Path(path).is_dir():
        return Path(path)
    return hub_snapshot(path) if names_are_hub() else None


@lru_cache(maxsize=1024)
def _adapter_digest(path: str, _load: int, _as_of: tuple[tuple[str, int, int], ...]) -> str:
    """Of the weights as they are when an adapter is first used after vLLM has loaded it as number `_load`.

    Reads all of them. Of weights that are in no folder here, a name that no other process has.
    """
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
