"""Decides when a run of pages is copied from the device to the host: numbers in, decisions out."""

from __future__ import annotations

from dataclasses import dataclass

from hiradix.errors import ConfigError


@dataclass(frozen=True)
class WritePolicy:
    """One row of `WRITE_POLICIES`.

    threshold: hits a run needs before an insert copies it to the host; 0 means inserts never copy.
    writes_on_evict: runs without a host copy are copied when the device evicts them.
    """

    name: str
    threshold: int
    writes_on_evict: bool

    @staticmethod
    def from_name(name: str) -> WritePolicy:
        """The policy of that name; raises ConfigError listing the names."""
        policy = WRITE_POLICIES.get(name)
        if policy is None:
            names = ", ".join(WRITE_POLICIES)
            raise ConfigError(f"--hicache-write-policy: unknown value {name!r}, expected one of {names}")
        return policy

    @property
    def writes_on_insert(self) -> bool:
        return self.threshold > 0

    def is_due(self, hit_count: int) -> bool:
        """Whether an insert that brought a run to `hit_count` hits copies it."""
        return self.writes_on_insert and hit_count >= self.threshold


WRITE_POLICIES = {
    policy.name: policy
    for policy in (
        WritePolicy("write_through", threshold=1, writes_on_evict=False),
        WritePolicy("write_through_selective", threshold=2, writes_on_evict=False),
        WritePolicy("write_back", threshold=0, writes_on_evict=True),
    )
}
