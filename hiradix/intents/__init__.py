"""Intents: what somebody wishes of the cache (locate, hold, forget, bring), and what becomes of it."""

from hiradix.intents.records import (
    ANY_SESSION,
    COMMON,
    OPERATOR,
    TIER_NAMES,
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
    "ANY_SESSION",
    "COMMON",
    "OPERATOR",
    "TIER_NAMES",
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
