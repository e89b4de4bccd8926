"""Weights the hints of tenants by their share: a tenant that hints at reuse of everything tells nothing."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

KEEP_ALIVE: Final = "keep_alive"
MAX_TENANTS: Final = 4096
RECENT: Final = 64  # requests of a tenant, after which those before count half
HEARD: Final = 0.4  # of a tenant's requests, at most


class HintShares:
    """Counts requests and `keep_alive` hints by tenant. Bounded; O(1) a call."""

    def __init__(self) -> None:
        self._counts: OrderedDict[str, tuple[float, float]] = OrderedDict()  # requests, hints that were heard

    def ended(self, tenant: str) -> None:
        """A request of the tenant has ended."""
        requests, hints = self._counts.pop(tenant, (0.0, 0.0))
        if requests >= RECENT:
            requests, hints = requests / 2, hints / 2
        self._counts[tenant] = requests + 1, hints
        if len(self._counts) > MAX_TENANTS:
            self._counts.popitem(last=False)

    def hears(self, tenant: str, hint: str) -> bool:
        """Whether a hint is heard, and so counted: all but `keep_alive` of more than a share of the requests,
        beside other tenants."""
        requests, hints = self._counts.get(tenant, (0.0, 0.0))
        if hint != KEEP_ALIVE or (tenant in self._counts and len(self._counts) == 1):
            return True
        if hints + 1 > max(1.0, HEARD * requests):
            return False
        self._counts[tenant] = requests, hints + 1
        return True
