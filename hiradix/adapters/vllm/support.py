"""The vLLM versions and options that the connector serves. Refusals name the version or the flag."""

from __future__ import annotations

import logging
from typing import Any

from hiradix.adapters import versions
from hiradix.adapters.probe import Reads, installed_sources, is_without_sources, missing
from hiradix.adapters.vllm.uses import SCHEDULER_USES, USES
from hiradix.errors import ConfigError

TESTED = "0.32.0"

logger = logging.getLogger(__name__)


def installed_version() -> str:
    return versions.installed_version("vllm")


def lacking(read: Reads) -> tuple[str, ...]:
    """The reasons why the vLLM with these sources cannot be served, as sentences; empty if it can."""
    return missing(USES, read)


def require_known_release() -> None:
    """Raise ConfigError naming the installed vLLM and the pieces that are missing or other in it."""
    if is_without_sources("vllm"):
        logger.warning(
            "HiRadixConnector: vLLM %s has no Python sources here to look into",
            installed_version(),
        )
    elif pieces := lacking(installed_sources("vllm")):
        raise unsupported("; ".join(pieces))


def require_known_scheduler() -> None:
    """The same of what the scheduler class uses beyond that."""
    if not is_without_sources("vllm") and (pieces := missing(SCHEDULER_USES, installed_sources("vllm"))):
        raise unsupported("; ".join(pieces), "HiRadixScheduler")


def unsupported(error: ImportError | AttributeError | str, asked: str = "HiRadixConnector") -> ConfigError:
    """The error for a vLLM that lacks something which `asked` needs."""
    return ConfigError(
        f"{asked}: vLLM {installed_version()} is not supported: {error}. Tested with vLLM {TESTED}"
    )


def warn_if_untested() -> None:
    """Say so where the installed vLLM is none of the tested release."""
    version = installed_version()
    if not versions.is_of(version, TESTED, num_parts=2):
        logger.warning(
            "HiRadixConnector was tested with vLLM %s, this is %s, which has all that is used",
            TESTED,
            version,
        )


def refuse_options(config: Any, kv_caches: Any) -> None:
    """Raise ConfigError for what would save or load other pages than their names say.

    config, kv_caches: vLLM's VllmConfig and KVCacheConfig. Where vLLM's own prefix cache would be wrong, this
    one is too, and vLLM asks connectors all the same. With context parallelism a block holds each rank's
    share of more tokens than its size.
    """
    looks_ahead = any(
        getattr(group.kv_cache_spec, "non_causal", False) for group in kv_caches.kv_cache_groups
    )
    if looks_ahead or not config.model_config.is_prefix_caching_supported:
        raise ConfigError("--model: no prefix of this one's prompts can be cached, not by vLLM either")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(config.parallel_config, name, 1) > 1:
            size = getattr(config.parallel_config, name)
            raise ConfigError(f"--{name.replace('_', '-')} {size}: not supported")
    if getattr(config.cache_config, "use_replayssm", False):
        raise ConfigError("--use-replayssm: how much of a state is still to be replayed is in no block of it")


def is_zeroed_early(config: Any, kv_caches: Any) -> bool:
    """Whether blocks are zeroed, or filled by vLLM, before the connector is asked to wait for the copy that
    still reads them. Where states or several precisions share blocks vLLM zeroes those that it hands out; its
    second model runner does so first of all. Then each step must wait for its own copies."""
    is_second = bool(getattr(config, "use_v2_model_runner", False))
    return is_second and bool(getattr(kv_caches, "needs_kv_cache_zeroing", False))


def refuse_write_back(config: Any, kv_caches: Any) -> None:
    """Raise ConfigError where what vLLM evicts is not to be had any more when a step writes to it."""
    if getattr(kv_caches, "has_mamba_layers", False):
        raise ConfigError(
            "hicache_write_policy write_back with recurrent states: a request's table does not say where they "
            "are once it has ended; use write_through"
        )
    if is_zeroed_early(config, kv_caches):
        raise ConfigError(
            "hicache_write_policy write_back with KV caches of different precisions: vLLM zeroes blocks before "
            "they could be saved; use write_through"
        )


def roles_of(transfer: Any) -> tuple[bool, bool]:
    """Whether `kv_role` has this engine save what it computes, and load what is there: kv_producer saves alone,
    kv_consumer loads alone, kv_both does both."""
    return bool(transfer.is_kv_producer), bool(transfer.is_kv_consumer)
