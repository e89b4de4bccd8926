"""GHD, ghost-trained hit density: evict what is expected to give the fewest hits per token of residence.

Each page is in a class, by what the request that used it last looked like: which turn of a conversation,
how much was new, how long the answer; or, of data that many conversations share, how often and how recently
it was used. Per class and age the policy learns online, from what is cached and from ghosts, how likely the
next use is, and ranks by the Gittins index of that. No clock, no randomness, no addresses: ranks that see
the same requests decide the same.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hiradix.errors import ConfigError
from hiradix.policy.ghd_learner import GhdLearner
from hiradix.policy.ghd_order import GhdOrder
from hiradix.policy.learning import SharedLog
from hiradix.tree import OrderContext

logger = logging.getLogger(__name__)


class GhdPolicy(SharedLog[GhdLearner]):
    """`ghd` for one cache: an order factory that shares one learner among tiers and components.

    config: beside `page_tokens`, `tables`, a file to start from and to save to when the cache is closed.
    """

    def __init__(self, config: Mapping[str, Any]):
        super().__init__(config, GhdLearner)
        self._path = None if config.get("tables") is None else Path(str(config["tables"]))

    def __call__(self, context: OrderContext) -> GhdOrder:
        learner = self.log_of(context)
        order = GhdOrder(context, learner, learner.tables)
        learner.orders.append(order)
        return order

    def begun(self, log: GhdLearner) -> None:
        if self._path is None or not self._path.exists():
            return
        try:
            log.tables.load(self._path)
        except ConfigError as error:
            logger.warning("%s; starting without", error)

    def close(self) -> None:
        """Save the tables, if a file was named."""
        if self._path is None or self._log is None:
            return
        self._log.recompute()
        try:
            self._log.tables.save(self._path)
        except OSError as error:
            logger.warning("ghd tables %s: not saved: %s", self._path, error)


def check_config(name: str, config: Mapping[str, Any]) -> None:
    """ConfigError names a bad value of a learning policy's settings."""
    tokens, tables = config.get("page_tokens"), config.get("tables")
    if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1):
        raise ConfigError(f"{name} page_tokens must be a whole number >= 1, got {tokens!r}")
    if tables is not None and (not isinstance(tables, str) or not tables):
        raise ConfigError(f"{name} tables must be the name of a file, got {tables!r}")
