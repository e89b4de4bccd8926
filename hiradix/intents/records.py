"""Records of wishes and their receipts, which all faces and planners share.

    Selector   whose pages, or which        a prefix, a session, a tenant, everything
    Intent     one wish about them          locate, hold, forget, bring
    Receipt    what became of it so far     state, reason, how much is done of how much, what it saved

Nothing here moves a page: `hiradix.cache.intents` carries wishes out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Final

from hiradix.errors import CacheError
from hiradix.tree import RadixKey

TIER_NAMES: Final = ("device", "host", "storage")
OPERATOR: Final = ""
"""Who asks where nobody's name is given: whoever runs the server, to whom every tenant's wishes give way."""
COMMON: Final = "common"
"""Who asks by a request of no tenant: he names what is in no tenant's namespace, with one tenant's budget."""
ANY_SESSION: Final = "*"
"""The series of leases of requests that name no session."""
MAX_NAME_CHARS: Final = 256
MAX_SELECTED_CHARS: Final = 1 << 14
"""Of an engine's name of a tenant, or of a session, which is its tenant, adapter and client's name as JSON."""
WISH_WAIT_S: Final = 30.0
"""Longest time to reach what is wished, where nothing else is said."""
BRING_WAIT_S: Final = 600.0
"""The same of `bring`, of which more may be wished."""


class BadIntent(CacheError, ValueError):
    """A wish that means nothing, or that no cache of this kind can carry out. field: what is wrong with it."""

    def __init__(self, field: str, message: str):
        super().__init__(f"{field}: {message}")
        self.field = field


class Verb(Enum):
    """The operation that a wish asks for."""

    LOCATE = "locate"  # say how far it is there, in each tier
    HOLD = "hold"  # keep it in a tier until a time
    FORGET = "forget"  # have it nowhere any more
    BRING = "bring"  # have it in another tier, or another store, too


class SelectorKind(Enum):
    """The kinds of selector."""

    PREFIX = "prefix"
    SESSION = "session"
    TENANT = "tenant"
    EVERYTHING = "everything"


@dataclass(frozen=True, eq=False)
class Selector:
    """The pages that a wish is about. Made by `prefix`, `session`, `tenant` and `everything`.

    key: of a prefix; one of no tokens is its whole namespace. name: of a session or a tenant, as
    `Namespace.tenant` names him. tenant: of a session, whose it is, likewise.

    >>> Selector.prefix(RadixKey([1, 2, 3], cache_salt="alice")).tenant
    'salt:alice'
    >>> str(Selector.session("chat-7", tenant="salt:alice"))
    "session 'chat-7' of 'salt:alice'"
    """

    kind: SelectorKind
    key: RadixKey | None = None
    name: str = ""
    tenant: str = ""

    @staticmethod
    def prefix(key: RadixKey) -> Selector:
        """The whole pages of `key`."""
        return Selector(SelectorKind.PREFIX, key, tenant=key.space.tenant)

    @staticmethod
    def session(name: str, tenant: str = "") -> Selector:
        """The prompts that a session has sent lately."""
        return Selector(SelectorKind.SESSION, name=_name("session", name), tenant=tenant)

    @staticmethod
    def tenant_of(name: str) -> Selector:
        """All that a tenant has, of every adapter. "": what is nobody's in particular."""
        return Selector(SelectorKind.TENANT, name=name, tenant=name)

    @staticmethod
    def everything() -> Selector:
        """All pages of all tenants."""
        return Selector(SelectorKind.EVERYTHING)

    def __str__(self) -> str:
        if self.key is not None:
            return f"a prefix of {len(self.key)} tokens of {self.tenant!r}"
        if self.kind is SelectorKind.SESSION:
            return f"session {self.name!r} of {self.tenant!r}"
        return f"tenant {self.name!r}" if self.kind is SelectorKind.TENANT else "everything"


@dataclass(frozen=True)
class Intent:
    """One wish. BadIntent names the field that makes no sense.

    tiers: locate: where to look; hold: the one tier where pages are to stay; forget: where they are to be gone
    from; bring: unused. target: of bring, "host", "storage" or another store's name.
    ttl_s: of hold, seconds from when it is applied. wait_s: longest time to reach what is wished: to bring what
    is to be held, to wait for what is in use, to read or write storage.
    max_bytes: most bytes that are held or brought; None: no limit of its own.
    is_whole: forget a prefix whole: also those of its pages that other prompts share, and what continues those.
    is_move: bring to another store, and forget in storage here what has come there.
    series: of hold, a session. Its lease whose prefix this one continues, with the same ttl_s, goes on as this
    one; it has four, and the one renewed longest ago ends for another. ANY_SESSION: those of requests without a
    session, however many. "": only a lease of the same prefix goes on.
    asked_by: a tenant, as `Namespace.tenant` names him, COMMON, or OPERATOR.

    >>> Intent(Verb.HOLD, Selector.everything(), tiers=("cellar",))
    Traceback (most recent call last):
    hiradix.intents.records.BadIntent: tiers: 'cellar' is no tier, expected device, host or storage
    """

    verb: Verb
    selector: Selector
    tiers: tuple[str, ...] = ()
    ttl_s: float = 0.0
    wait_s: float = WISH_WAIT_S
    max_bytes: int | None = None
    target: str = ""
    is_whole: bool = False
    is_move: bool = False
    series: str = ""
    asked_by: str = OPERATOR

    def __post_init__(self) -> None:
        for tier in self.tiers:
            if tier not in TIER_NAMES:
                raise BadIntent("tiers", f"{tier!r} is no tier, expected device, host or storage")
        for name, seconds in (("ttl_s", self.ttl_s), ("wait_s", self.wait_s)):
            if not (math.isfinite(seconds) and seconds >= 0):
                raise BadIntent(name, f"expected seconds, 0 or more, got {seconds}")
        if self.max_bytes is not None and self.max_bytes < 0:
            raise BadIntent("max_bytes", f"expected bytes, 0 or more, got {self.max_bytes}")
        if self.verb is Verb.HOLD:
            self._check_hold()
        elif self.ttl_s:
            raise BadIntent("ttl_s", f"only a hold ends by itself, not a {self.verb.value}")
        elif self.series:
            raise BadIntent("series", f"only holds are of one, not a {self.verb.value}")
        if self.verb is Verb.BRING:
            self._check_bring()
        elif self.target or self.is_move:
            raise BadIntent("target", f"only a bring has one, not a {self.verb.value}")
        if self.is_whole and self.verb is not Verb.FORGET:
            raise BadIntent("is_whole", f"only of forget, not of {self.verb.value}")

    def _check_hold(self) -> None:
        if self.tiers not in (("device",), ("host",)):
            raise BadIntent("tiers", f"a hold is in device or in host, got {', '.join(self.tiers) or 'none'}")
        if not self.ttl_s:
            raise BadIntent("ttl_s", "a hold ends by itself: after how many seconds?")
        if self.series and self.selector.key is None:
            raise BadIntent("series", "only holds of a prefix are of one")

    def _check_bring(self) -> None:
        if not self.target or len(self.target) > MAX_NAME_CHARS:
            raise BadIntent("target", "expected host, storage, or the name of another store")
        if self.target in TIER_NAMES and self.is_move:
            raise BadIntent("is_move", f"only to another store, not to {self.target}")
        if self.target == "device":
            raise BadIntent("target", "what runs next is loaded to the device then; expected host or storage")


class IntentState(Enum):
    """The progress of a wish. The last five are ends."""

    ACCEPTED = "accepted"  # it is applied with the next tick
    RUNNING = "running"  # pages are on their way, or in use by others
    HELD = "held"  # a lease is in force
    DONE = "done"
    REFUSED = "refused"
    EXPIRED = "expired"  # a lease reached its end, or what was to be done its deadline
    CANCELLED = "cancelled"  # by whoever asked, or by a wish that goes before it
    FAILED = "failed"  # a tier answered with a fault

    @property
    def is_end(self) -> bool:
        return self not in (IntentState.ACCEPTED, IntentState.RUNNING, IntentState.HELD)


@dataclass(frozen=True)
class Amount:
    """An amount of data: pages of tokens, tokens, and bytes of all components of them."""

    pages: int = 0
    tokens: int = 0
    bytes: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.pages + other.pages, self.tokens + other.tokens, self.bytes + other.bytes)


@dataclass(frozen=True)
class Found:
    """The part of the selected pages that one tier has.

    tokens: of a prefix, its leading tokens that can be used from there, with what lies in the tiers above; of
    anything else, tokens that it has. by_component: pages that each component has there. is_known: False:
    storage has not answered, or was not asked.
    """

    tokens: int = 0
    by_component: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    is_known: bool = True


@dataclass(frozen=True)
class Receipt:
    """The state of a wish at the moment when it was asked for.

    id: names it from here on; a second hold by the same owner of the same prefix in the same tier goes on under
    the first one's. total: what is to be done of what was asked; done: what is. clipped: why total is less than
    what was asked for, "" where it is not. reason: why it was refused, failed, ended early or waits.
    remaining_s: until a lease ends, or a running wish reaches its deadline.
    found: of locate, by tier. by_tier: of forget, what is gone from each. saved_tokens: that requests have found
    where it held or brought them.
    """

    id: int
    intent: Intent
    state: IntentState
    done: Amount = Amount()
    total: Amount = Amount()
    clipped: str = ""
    reason: str = ""
    remaining_s: float = 0.0
    found: Mapping[str, Found] = field(default_factory=lambda: MappingProxyType({}))
    by_tier: Mapping[str, Amount] = field(default_factory=lambda: MappingProxyType({}))
    saved_tokens: int = 0

    @property
    def verb(self) -> Verb:
        return self.intent.verb


@dataclass(frozen=True)
class TenantUse:
    """One tenant's part of the cache. Bytes of all components.

    held_bytes, budget_bytes: of device and host, by its leases, and the most of that. storage_bytes: None: no
    account is kept there, or it is not one of those with the most.
    """

    tenant: str
    device_bytes: int = 0
    host_bytes: int = 0
    storage_bytes: int | None = None
    held_bytes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    budget_bytes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    num_leases: int = 0
    saved_tokens: int = 0


@dataclass(frozen=True)
class IntentStats:
    """Figures of wishes, for metrics. Tokens of full attention.

    ended: wishes by verb and how they ended, since start. held_tokens, cap_tokens: of leases, by tier.
    """

    num_open: int = 0
    num_leases: int = 0
    num_sessions: int = 0
    ended: dict[tuple[str, str], int] = field(default_factory=dict)
    held_tokens: dict[str, int] = field(default_factory=dict)
    cap_tokens: dict[str, int] = field(default_factory=dict)
    forgotten_tokens: dict[str, int] = field(default_factory=dict)
    saved_tokens: int = 0

    def figures(self) -> dict[str, int]:
        """All of it by name, flat."""
        tiers = {f"held_{tier}_tokens": count for tier, count in self.held_tokens.items()}
        caps = {f"cap_{tier}_tokens": count for tier, count in self.cap_tokens.items()}
        gone = {f"forgotten_{tier}_tokens": count for tier, count in self.forgotten_tokens.items()}
        ended = {f"{verb}_{state}": count for (verb, state), count in self.ended.items()}
        named = {"open": self.num_open, "leases": self.num_leases, "sessions": self.num_sessions}
        return {**named, "saved_tokens": self.saved_tokens, **tiers, **caps, **gone, **ended}


def _name(what: str, name: str) -> str:
    if not name or len(name) > MAX_SELECTED_CHARS:
        raise BadIntent(what, f"expected a name of 1 to {MAX_SELECTED_CHARS} characters, got {len(name)}")
    return name
