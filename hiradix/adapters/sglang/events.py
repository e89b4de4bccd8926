"""Our KV events as SGLang's records, which its scheduler publishes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.disaggregation import kv_events as sglang_records

from hiradix.adapters.sglang.lora_adapters import LoraAdapters
from hiradix.errors import Misuse
from hiradix.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    KVEvents,
    Naming,
    storage_medium,
)
from hiradix.tree import RadixTree


def watch(
    params: Any, tree: RadixTree, storage_name: Callable[[], str | None], adapters: LoraAdapters
) -> KVEvents | None:
    """Notes what moves in `tree`, if SGLang's CacheInitParams ask for events."""
    if not params.enable_kv_cache_events:
        return None
    name_of = params.kv_event_lora_names.resolve
    naming = Naming(params.dynamo_kv_event_format, lambda extra_key: name_of(adapters.plain(extra_key)))
    return KVEvents(tree, naming, lambda: storage_medium(storage_name()))


def as_sglang(event: Event) -> Any:
    """One event as SGLang's record of that name."""
    if isinstance(event, BlockStored):
        return sglang_records.BlockStored(
            block_hashes=event.block_hashes,
            parent_block_hash=event.parent_block_hash,
            token_ids=event.token_ids,
            block_size=event.block_size,
            lora_id=event.lora_id,
            medium=event.medium,
            cache_salt=event.cache_salt,
            lora_name=event.lora_name,
        )
    if isinstance(event, BlockRemoved):
        return sglang_records.BlockRemoved(block_hashes=event.block_hashes, medium=event.medium)
    if not isinstance(event, AllBlocksCleared):
        raise Misuse(f"an event of no known kind: {event}")
    return sglang_records.AllBlocksCleared()
