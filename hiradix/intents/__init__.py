"""Intents: what somebody wishes of the cache (locate, hold, forget, bring), and what becomes of it."""

from hiradix.intents.records import (
    BRING_WAIT_S,
    OPERATOR,
    TIER_NAMES,
    WISH_WAIT_S,
    Amount,
    BadIntent,
    Found,
    Intent,
    IntentState,
    IntentStats,
    Receipt,
    Selector,
    SelectorKind,
    TenantUse,
    Verb,
)

__all__ = [
    "BRING_WAIT_S",
    "OPERATOR",
    "TIER_NAMES",
    "WISH_WAIT_S",
    "Amount",
    "BadIntent",
    "Found",
    "Intent",
    "IntentState",
    "IntentStats",
    "Receipt",
    "Selector",
    "SelectorKind",
    "TenantUse",
    "Verb",
]
