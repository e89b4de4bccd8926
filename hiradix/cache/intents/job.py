"""One wish that is being carried out, and its receipt."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from hiradix.cache.intents.planner import Planner
from hiradix.intents import Amount, Found, Intent, IntentState, Receipt
from hiradix.intents.limits import IntentLimits
from hiradix.tree import Node


class IntentJob(ABC):
    """One wish, from when it was accepted to when its receipt is forgotten.

    deadline_s: when what is running ends at the latest; of a lease in force, when that ends. nodes: whose use is
    counted as saved by it.
    """

    def __init__(self, number: int, intent: Intent, planner: Planner, limits: IntentLimits):
        self.id = number
        self.intent = intent
        self.state = IntentState.ACCEPTED
        self.reason = self.clipped = ""
        self.done = self.total = Amount()
        self.found: dict[str, Found] = {}
        self.by_tier: dict[str, Amount] = {}
        self.saved_tokens = 0
        self.deadline_s = planner.clock() + min(intent.wait_s, limits.max_wait_s)
        self._planner = planner
        self._limits = limits

    @property
    def is_open(self) -> bool:
        return not self.state.is_end

    @abstractmethod
    def begin(self) -> None:
        """The wish is applied: the first step."""

    @abstractmethod
    def advance(self) -> None:
        """One step more; also where its deadline has passed, which `is_over` says."""

    def nodes(self) -> Iterable[Node]:
        """The ends of the paths that it has held or brought."""
        return ()

    @abstractmethod
    def let_go(self) -> None:
        """Give back all that it holds: it has ended."""

    @property
    def is_over(self) -> bool:
        return self._planner.clock() >= self.deadline_s

    def end(self, state: IntentState, reason: str = "") -> None:
        """Let go of everything and end in this state; only the first call counts."""
        if self.is_open:
            self.let_go()
            self.state, self.reason = state, reason

    def refuse(self, reason: str) -> None:
        """Refuse the wish, and reveal nothing of what it was made to look at."""
        self.found.clear()
        self.state, self.reason = IntentState.REFUSED, reason

    def receipt(self) -> Receipt:
        """The wish's receipt as of now."""
        left = max(0.0, self.deadline_s - self._planner.clock()) if self.is_open else 0.0
        return Receipt(
            self.id, self.intent, self.state, self.done, self.total, self.clipped, self.reason, left,
            dict(self.found), dict(self.by_tier), self.saved_tokens,
        )  # fmt: skip
