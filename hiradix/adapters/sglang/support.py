"""The SGLang versions and options that the adapter serves. Refusals name the version or the flag."""

from __future__ import annotations

import logging
from enum import Enum
from typing import Any

from hiradix.adapters import versions
from hiradix.adapters.probe import Reads, ReleaseSources, installed_sources, is_without_sources, missing
from hiradix.adapters.sglang import uses
from hiradix.errors import ConfigError

TESTED = "0.5.23"
TESTED_TOO = ("0.5.22", "0.5.15")  # the last with the older contract

logger = logging.getLogger(__name__)


class Api(Enum):
    """The generations of SGLang's prefix-cache contract, told apart by what its base class asks for."""

    CHECKPOINT = "checkpoint"
    FINISHED_REQ = "cache_finished_req"


def installed_version() -> str:
    return versions.installed_version("sglang")


def unsupported_version(version: str, reason: str) -> ConfigError:
    """The error for an SGLang that cannot be served."""
    return ConfigError(
        f"--radix-cache-backend hiradix: SGLang {version} is not supported: {reason}. "
        f"Use SGLang {TESTED}, {' or '.join(TESTED_TOO)}, which are tested"
    )


def warn_if_untested() -> None:
    """Say so where the installed SGLang is none of the tested ones."""
    version = installed_version()
    if not any(versions.is_of(version, release) for release in (TESTED, *TESTED_TOO)):
        logger.warning(
            "--radix-cache-backend hiradix was tested with SGLang %s, this is %s, which has all that is used",
            TESTED,
            version,
        )


def lacking(read: Reads) -> tuple[str, ...]:
    """The reasons why the SGLang with these sources cannot be served, as sentences; empty if it can."""
    engine = ReleaseSources(read)
    found = engine.find(f"{uses.BASE}:BasePrefixCache")
    if engine.tree(uses.REGISTRY) is None:
        return (f"there is no {uses.REGISTRY}",)
    asked = set() if found is None else engine.abstract(*found)
    if Api.CHECKPOINT.value in asked:
        return missing(uses.CHECKPOINT, read)
    if Api.FINISHED_REQ.value in asked:
        return missing(uses.FINISHED_REQ, read)
    known = " or ".join(api.value for api in Api)
    return (f"its BasePrefixCache asks for no {known}, but for {', '.join(sorted(asked)) or 'nothing'}",)


def require_known_release() -> None:
    """Raise ConfigError naming the installed SGLang and the pieces that are missing or other in it.

    Reads its sources: about a second.
    """
    if is_without_sources("sglang"):
        logger.warning(
            "--radix-cache-backend hiradix: SGLang %s has no Python sources here to look into",
            installed_version(),
        )
    elif pieces := lacking(installed_sources("sglang")):
        raise unsupported_version(installed_version(), "; ".join(pieces))


def api_of(base_class: type) -> Api:
    """The contract that `base_class`, SGLang's BasePrefixCache, asks for. Raises ConfigError naming the
    version."""
    asked: Any = getattr(base_class, "__abstractmethods__", ())
    for api in Api:
        if api.value in asked:
            return api
    known = " or ".join(api.value for api in Api)
    raise unsupported_version(installed_version(), f"its BasePrefixCache has no {known}")


SHARDED = "its pages are spread over ranks, each prefix in an order of its own that pages do not carry"
# Allocators of exactly these classes: one that inherits from them may hand pages out otherwise.
_ALLOCATORS = ("TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator", "SWATokenToKVPoolAllocator")
_INTERLEAVED = "PageInterleavePoolAllocator"  # of --enable-kv-cache-sharding

# attribute of the resolved flags: the flag, and what to do instead
_REFUSED_FLAGS = {
    "enable_lmcache": ("--enable-lmcache", "it is a cache hierarchy of its own"),
    "enable_flexkv": ("--enable-flexkv", "it is a cache hierarchy of its own"),
    "enable_unified_cache_external_linker": (
        "--enable-unified-cache-external-linker",
        "use --enable-hierarchical-cache with --hicache-storage-backend",
    ),
    "enable_unified_memory": ("--enable-unified-memory", "its pools are one buffer of records"),
    "enable_page_major_kv_layout": ("--enable-page-major-kv-layout", "its pools are one buffer of records"),
    "enable_session_radix_cache": ("--enable-session-radix-cache", "sessions are not tracked"),
    "enable_hisparse": ("--enable-hisparse", "it moves pages of running requests itself"),
    "enable_kv_cache_sharding": ("--enable-kv-cache-sharding", SHARDED),
}


def refuse_flags(flags: Any) -> None:
    """Raise ConfigError for the first option that cannot be served. flags: what has SGLang's attributes."""
    for attribute, (flag, reason) in _REFUSED_FLAGS.items():
        if getattr(flags, attribute, False):
            raise refusal(flag, reason)


def refuse_allocator(allocator: Any) -> None:
    """Raise ConfigError for an allocator of SGLang's that is not known, by its class and what asks for it."""
    kind = type(allocator).__name__
    if _INTERLEAVED in (base.__name__ for base in type(allocator).__mro__):
        raise refusal(f"The allocator {kind} (--enable-kv-cache-sharding)", SHARDED)
    if kind not in _ALLOCATORS:
        known = ", ".join(_ALLOCATORS)
        raise refusal(
            f"This model's allocator {kind}", f"only {known} are known, another may hand pages out otherwise"
        )


def refusal(flag: str, reason: str) -> ConfigError:
    """The error for an option that cannot be served, whose flag it names."""
    return ConfigError(f"{flag} is not supported with --radix-cache-backend hiradix: {reason}")
