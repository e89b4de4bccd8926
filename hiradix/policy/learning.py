"""The base of policies that learn: one log of uses for all orders of a cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from hiradix.errors import Misuse
from hiradix.policy.uses import UseLog
from hiradix.tree import EvictionOrder, OrderContext, OrderFactory

LogT = TypeVar("LogT", bound=UseLog)


@runtime_checkable
class LearningPolicy(Protocol):
    """The border to policies that learn: an order factory whose orders share what they learn from
    requests that have ended."""

    @property
    def learner(self) -> UseLog: ...

    def __call__(self, context: OrderContext) -> EvictionOrder: ...

    def close(self) -> None: ...


def learner_of(factory: OrderFactory) -> UseLog | None:
    """The log of uses that a tree's order factory learns from; None if it does not learn."""
    return factory.learner if isinstance(factory, LearningPolicy) else None


class SharedLog(Generic[LogT]):
    """The log that a policy's orders share. It is made with the first of them, which says the page size.

    config: `page_tokens`, tokens that a page stands for if not `page_size` (a replay's page is a name).
    """

    def __init__(self, config: Mapping[str, Any], make: Callable[[int, int], LogT]):
        self._page_tokens: int | None = config.get("page_tokens")
        self._make = make
        self._log: LogT | None = None

    @property
    def learner(self) -> LogT:
        if self._log is None:
            raise Misuse("no tree was made with this policy")
        return self._log

    def log_of(self, context: OrderContext) -> LogT:
        """The log for an order that is being made."""
        if self._log is None:
            self._log = self._make(context.page_size, self._page_tokens or context.page_size)
            self.begun(self._log)
        self._log.order_made(context)
        return self._log

    def begun(self, log: LogT) -> None:
        """The log has just been made."""

    def close(self) -> None:
        """The cache is being closed."""
