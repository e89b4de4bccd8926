"""Whether vLLM has emptied its own prefix cache: it tells its connector only where it is asked to.

Trainers that know nothing of connectors change weights and then call `reset_prefix_cache()`. vLLM then has
another map from block hashes to blocks, with its prefix cache off too.
"""

from __future__ import annotations

from typing import Any

from hiradix.adapters.vllm.support import unsupported

MAP = "cached_block_hash_to_block"


class ResetWatch:
    """Notices that vLLM has emptied its own prefix cache. Sees nothing before `bind`."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._map: Any = None

    def bind(self, pool: Any) -> None:
        """pool: vLLM's block pool, one for the engine's life. ConfigError if it has no such map."""
        try:
            self._pool, self._map = pool, getattr(pool, MAP)
        except AttributeError as error:
            raise unsupported(error) from error

    def has_seen_one(self) -> bool:
        """Whether there was a reset since the last call."""
        before, self._map = self._map, getattr(self._pool, MAP, None)
        return before is not self._map
