"""Decides when storage is asked for a prompt's pages, and how long its request waits: numbers in, decisions
out.

No clock in here: the caller measures and passes seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hiradix.errors import ConfigError

TOKENS_PER_KI = 1024


@dataclass(frozen=True)
class PrefetchLimits:
    """Numbers of the extra config (names and defaults as upstream's) and the size of a page.

    threshold_tokens: shortest storage hit worth fetching; never less than one page.
    capacity_share: share of each host pool that is held for requests that wait, at most.
    """

    page_size: int
    threshold_tokens: int = 256
    timeout_base_s: float = 1.0
    timeout_s_per_ki_token: float = 0.25
    capacity_share: float = 0.5

    @property
    def threshold_pages(self) -> int:
        return max(1, math.ceil(self.threshold_tokens / self.page_size))

    def deadline_s(self, num_pages: int) -> float:
        """Seconds a prefetch of `num_pages` may hold its request: base and a share per token."""
        per_page = self.page_size / TOKENS_PER_KI * self.timeout_s_per_ki_token
        return self.timeout_base_s + num_pages * per_page

    def capacity_pages(self, host_pages: int) -> int:
        """Pages of a host pool of `host_pages` that are held for all requests that wait together."""
        return int(self.capacity_share * host_pages)


@dataclass(frozen=True)
class PrefetchPolicy:
    """best_effort never holds a request, wait_complete until all is read, timeout up to a deadline."""

    name: str
    limits: PrefetchLimits = field(repr=False)

    @staticmethod
    def from_name(name: str, limits: PrefetchLimits) -> PrefetchPolicy:
        """The policy of that name; raises ConfigError listing the names."""
        if name not in PREFETCH_POLICIES:
            raise ConfigError(
                f"--hicache-storage-prefetch-policy: unknown value {name!r}, "
                f"expected one of {', '.join(PREFETCH_POLICIES)}"
            )
        return PrefetchPolicy(name, limits)

    def worth_asking(self, num_pages: int) -> bool:
        """Whether a prompt with `num_pages` pages that no tier has is looked up in storage."""
        return num_pages >= self.limits.threshold_pages

    def worth_reading(self, num_hit_pages: int) -> bool:
        """Whether a storage hit of `num_hit_pages` is fetched."""
        return num_hit_pages >= self.limits.threshold_pages

    def room_wait_s(self, pages_ahead: int, num_pages: int) -> float:
        """Longest a request that could run waits for host room for `num_pages`, with so many held or to be
        fetched before them. 0 where it waits for nothing; else never for ever, as room may be held by requests
        that cannot run."""
        if self.name == "best_effort":
            return 0.0
        return self.limits.deadline_s(pages_ahead + num_pages)

    def should_stop(self, elapsed_s: float, num_pages: int) -> bool:
        """Whether a request that has waited `elapsed_s` for `num_pages` goes on with what has arrived."""
        return elapsed_s >= self.wait_limit_s(num_pages)

    def wait_limit_s(self, num_pages: int) -> float:
        """Longest a request waits for `num_pages`: 0, for ever (inf), or the limits' deadline."""
        if self.name == "best_effort":
            return 0.0
        if self.name == "wait_complete":
            return math.inf
        return self.limits.deadline_s(num_pages)


PREFETCH_POLICIES = ("best_effort", "wait_complete", "timeout")
