"""KV events: which blocks are in which tier, told to routers and viewers in SGLang's wire format.

    tree --Watch--> KVEvents (notes what moved) --once per step--> Publisher (names it, sends it) --> ZeroMQ

Nothing here is imported, and nothing is noted, unless events are asked for.
"""

from hiradix.events.config import KVEventsConfig, parse_kv_events_config, read_kv_events_config
from hiradix.events.open import open_publisher
from hiradix.events.recorder import KVEvents
from hiradix.events.wire_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    Medium,
    Naming,
    storage_medium,
)

__all__ = [
    "AllBlocksCleared", "BlockRemoved", "BlockStored", "Event", "KVEvents", "KVEventsConfig", "Medium",
    "Naming", "open_publisher", "parse_kv_events_config", "read_kv_events_config", "storage_medium",
]  # fmt: skip
