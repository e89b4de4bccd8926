"""Sums of the tokens that sessions would leave to a waiting one, kept so that no request looks at every
session."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Inside(NamedTuple):
    """A session that is in. away_s: seconds until it is expected back; None: it is not idle."""

    tenant: str
    footprint: int
    is_running: bool
    away_s: float | None


class Rooms:
    """Sessions that are in, as of one moment. O(sessions) once and for each `far_s`, O(tenants) for each share
    of the capacity, and O(1) for each that waits beside."""

    def __init__(self, capacity: int, inside: Iterable[Inside]) -> None:
        self._capacity = capacity
        self._inside = list(inside)
        self._held: dict[str, int] = {}  # tokens, by tenant
        self._still: dict[str, int] = {}  # those of sessions of which nothing runs
        for one in self._inside:
            self._held[one.tenant] = self._held.get(one.tenant, 0) + one.footprint
            if not one.is_running:
                self._still[one.tenant] = self._still.get(one.tenant, 0) + one.footprint
        self._far: dict[float, dict[str, int]] = {}  # those of sessions that are far, by how far that is
        self._sums: dict[tuple[float, int], tuple[int, int]] = {}

    def room_for(self, tenant: str, footprint: int, far_s: float) -> int:
        """Tokens for a session that is not in: of idle ones expected back not before `far_s`; and if its tenant
        has less than its share, all of which nothing runs of those with more. Where it would have more itself,
        only those with more leave."""
        held = self._held.get(tenant, 0)
        num_tenants = len(self._held) + (tenant not in self._held)
        far = self._far_by_tenant(far_s)
        poor, rich = self._sums_of(far_s, num_tenants)
        share = self._capacity / num_tenants
        if held + footprint <= share:
            return poor
        return rich if held > share else rich + far.get(tenant, 0)

    def _far_by_tenant(self, far_s: float) -> dict[str, int]:
        found = self._far.get(far_s)
        if found is None:
            found = self._far[far_s] = {}
            for one in self._inside:
                if one.away_s is not None and not one.is_running and one.away_s >= far_s:
                    found[one.tenant] = found.get(one.tenant, 0) + one.footprint
        return found

    def _sums_of(self, far_s: float, num_tenants: int) -> tuple[int, int]:
        """Tokens that leave for a tenant that stays within its share; and for one above its share, those of
        far sessions of tenants above theirs."""
        found = self._sums.get((far_s, num_tenants))
        if found is None:
            far, share = self._far_by_tenant(far_s), self._capacity / num_tenants
            rich = [tenant for tenant, num_tokens in self._held.items() if num_tokens > share]
            far_rich = sum(far.get(tenant, 0) for tenant in rich)
            still_rich = sum(self._still.get(tenant, 0) for tenant in rich)
            found = self._sums[far_s, num_tenants] = (still_rich + sum(far.values()) - far_rich, far_rich)
        return found
