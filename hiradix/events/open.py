"""From a configuration and a tree to a running publisher; the one place that needs ZeroMQ installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hiradix.errors import ConfigError
from hiradix.events.config import FLAG, KVEventsConfig
from hiradix.events.recorder import KVEvents
from hiradix.events.wire_events import Naming, storage_medium
from hiradix.tree import RadixTree

if TYPE_CHECKING:
    from hiradix.events.publisher import Publisher


def open_publisher(
    config: KVEventsConfig, tree: RadixTree, host: str, storage_name: Callable[[], str | None]
) -> Publisher:
    """A publisher of what `tree`, which is empty, has from here on; the caller's to close.

    host: what `*` in an endpoint stands for. storage_name: the name of the storage backend there is.
    Raises ConfigError naming the key.
    """
    try:
        from hiradix.events.publisher import Publisher
    except ImportError as error:
        raise ConfigError(
            f"{FLAG}: publishing needs msgspec and pyzmq (pip install 'hiradix[events]'): {error}"
        ) from error
    events = KVEvents(tree, Naming(config.format == "dynamo"), lambda: storage_medium(storage_name()))
    return Publisher(config, events, host)
