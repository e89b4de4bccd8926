"""The caps on wishes: each is a number here, and a figure among the metrics."""

from __future__ import annotations

from dataclasses import dataclass

from hiradix.errors import ConfigError
from hiradix.settings import MAX_COUNT, MAX_SECONDS, Type, setting


@dataclass(frozen=True)
class IntentLimits:
    """Caps on wishes and leases, of one cache.

    Shares are of each pool, in pages of each component. What leases hold on the device gives way where a request
    could not run else; on the host nothing waits for it without a deadline.
    """

    device_share: float = setting(
        "intent_device_share", Type.NUMBER, 0.25, "share of each device pool that leases hold, at most",
        maximum=0.9,
    )  # fmt: skip
    host_share: float = setting(
        "intent_host_share", Type.NUMBER, 0.25, "share of each host pool that leases hold, at most",
        maximum=0.5,
    )  # fmt: skip
    tenant_share: float = setting(
        "intent_tenant_share", Type.NUMBER, 0.25,
        "share of what all leases may hold that one tenant's hold, at most; the operator may have all of it",
        maximum=1.0,
    )  # fmt: skip
    tenant_bytes: int | None = setting(
        "intent_tenant_bytes", Type.SIZE, None,
        "bytes that one tenant's leases hold in a tier, at most; none: its share alone",
    )  # fmt: skip
    max_ttl_s: float = setting(
        "intent_max_ttl_s", Type.SECONDS, 86400.0, "longest lease; one of more is clipped to it",
        minimum=0.001, maximum=MAX_SECONDS,
    )  # fmt: skip
    max_wait_s: float = setting(
        "intent_max_wait_s", Type.SECONDS, 600.0, "longest time to reach what is wished; more is clipped to it",
        minimum=0.001, maximum=MAX_SECONDS,
    )  # fmt: skip
    max_open: int = setting(
        "intent_max_open", Type.INTEGER, 256,
        "leases that have not ended, and as many other wishes; one more is refused. The operator's count for "
        "themselves", minimum=1, maximum=MAX_COUNT,
    )  # fmt: skip
    max_open_of_tenant: int = setting(
        "intent_max_open_of_tenant", Type.INTEGER, 64, "of these, one tenant's", minimum=1, maximum=MAX_COUNT,
    )  # fmt: skip
    max_receipts: int = setting(
        "intent_max_receipts", Type.INTEGER, 1024,
        "receipts of wishes that have ended; the oldest is forgotten for another", minimum=1, maximum=MAX_COUNT,
    )  # fmt: skip
    max_sessions: int = setting(
        "intent_max_sessions", Type.INTEGER, 4096,
        "sessions whose prompts are known by name; the one longest unused is forgotten for another",
        maximum=MAX_COUNT,
    )  # fmt: skip
    pages_per_tick: int = setting(
        "intent_pages_per_tick", Type.INTEGER, 4096,
        "pages that wishes drop, copy down or give to storage in one step of the engine, about",
        minimum=1, maximum=MAX_COUNT,
    )  # fmt: skip

    def __post_init__(self) -> None:
        for name in ("device_share", "host_share", "tenant_share"):
            share = getattr(self, name)
            if not 0 <= share <= 1:
                raise ConfigError(f"--intent-{name.replace('_', '-')}: expected a share of 1, got {share}")
