"""Which wrappers a backend gets, from the keys every backend has. All but the retry are off by default."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hiradix.errors import ConfigError
from hiradix.storage.kit.options import MAX_TIMEOUT_S, Options, flag
from hiradix.storage.protocol import StorageBackend, StorageContext, Traits
from hiradix.storage.wrappers import quantise
from hiradix.storage.wrappers.negative import NegativeCache
from hiradix.storage.wrappers.quota import QUOTA_KEYS, QuotaConfig
from hiradix.storage.wrappers.retry import RetryingStorage

WRAP_KEYS = (
    "retries",
    "retry_wait_s",
    "negative_ttl_s",
    "compression",
    "compression_level",
    "quantise",
    "encryption_key_file",
    *QUOTA_KEYS,
)
CODECS = ("none", "zstd")
QUANTISED = ("none", "fp8")
MAX_RETRIES, MAX_RETRY_WAIT_S = 100, 60.0


@dataclass(frozen=True)
class WrapConfig:
    """retries, retry_wait_s: of calls that raise. negative_ttl_s: how long absence is believed; 0 not at all.
    """

    retries: int = 1
    retry_wait_s: float = 0.05
    negative_ttl_s: float = 0.0
    compression: str = "none"
    compression_level: int = 1
    quantise: str = "none"
    encryption_key_file: str = ""
    quota: QuotaConfig = QuotaConfig()

    @staticmethod
    def from_mapping(values: Mapping[str, Any]) -> WrapConfig:
        """The wrappers' keys out of a backend's; raises ConfigError naming the bad one."""
        options, default = Options(values), WrapConfig()
        level = options.integer("compression_level", default.compression_level)
        if not 1 <= level <= 22:
            raise ConfigError(f"{flag('compression_level')} must be 1 to 22, got {level}")
        retries, wait_s = _retries(options, default)
        return WrapConfig(
            retries=retries,
            retry_wait_s=wait_s,
            negative_ttl_s=options.seconds("negative_ttl_s", default.negative_ttl_s),
            compression=options.choice("compression", default.compression, CODECS),
            compression_level=level,
            quantise=options.choice("quantise", default.quantise, QUANTISED),
            encryption_key_file=options.text("encryption_key_file", ""),
            quota=QuotaConfig.from_options(options),
        )


def _retries(options: Options, default: WrapConfig) -> tuple[int, float]:
    """How many, and the seconds before the first: a worker sleeps on for a call that nobody waits for.
    """
    retries = options.integer("retries", default.retries, maximum=MAX_RETRIES)
    wait_s = options.seconds("retry_wait_s", default.retry_wait_s, maximum=MAX_TIMEOUT_S)
    all_s = wait_s * (2.0**retries - 1)
    if all_s > MAX_RETRY_WAIT_S:
        waits = f"{retries} waits, each twice the one before, the first of {flag('retry_wait_s')} {wait_s:g}"
        raise ConfigError(
            f"{flag('retries')} {retries}: {waits}, are {all_s:.3g} s; at most {MAX_RETRY_WAIT_S:g} s"
        )
    return retries, wait_s


def coded(context: StorageContext) -> StorageContext:
    """The same with names for what is stored: pages that do not come back exactly have their own."""
    if WrapConfig.from_mapping(context.extra_config).quantise == "none":
        return context
    fingerprint = dataclasses.replace(context.fingerprint, codec=quantise.CODEC)
    return dataclasses.replace(context, fingerprint=fingerprint)


def inner_context(context: StorageContext, config: WrapConfig) -> StorageContext:
    """What the wrapped backend is made from: its pages are longer, or of any length. Raises ConfigError."""
    page_bytes, extra_bytes = context.page_bytes, 0
    if config.quantise != "none":
        page_bytes = quantise.coded_bytes(page_bytes, context.elements)
    if config.encryption_key_file:
        extra_bytes += encryption().OVERHEAD_BYTES
    if config.compression != "none":
        extra_bytes += _compression().OVERHEAD_BYTES
    return dataclasses.replace(
        context, page_bytes=page_bytes + extra_bytes, ragged=config.compression != "none"
    )


def wrap(backend: StorageBackend, context: StorageContext, config: WrapConfig) -> StorageBackend:
    """`backend`, made from `inner_context`, in its wrappers. Raises ConfigError, having closed it."""
    try:
        if config.retries:
            backend = RetryingStorage(backend, config.retries, config.retry_wait_s)
        if config.encryption_key_file:
            module = encryption()
            key = module.read_key(config.encryption_key_file)
            backend = module.EncryptedStorage(backend, key, context.fingerprint.digest()[:32])
        if config.compression != "none":
            if not getattr(backend, "traits", Traits()).ragged:
                raise ConfigError(
                    f"{flag('compression')}: this backend stores pages of one length only; "
                    "redis, valkey and s3 take any"
                )
            backend = _compression().CompressedStorage(backend, config.compression_level)
        if config.quantise != "none":
            backend = quantise.QuantisedStorage(backend, context.fingerprint, context.elements)
        if config.negative_ttl_s:
            backend = NegativeCache(backend, config.negative_ttl_s)
    except ConfigError:
        backend.close()
        raise
    return backend


def encryption() -> Any:
    """The module `encrypt`; raises ConfigError with what to install where its package is missing."""
    try:
        from hiradix.storage.wrappers import encrypt
    except ImportError as error:
        hint = "install it with: pip install 'hiradix[encryption]'"
        raise ConfigError(f"{flag('encryption_key_file')}: {error}; {hint}") from error
    return encrypt


def _compression() -> Any:
    try:
        from hiradix.storage.wrappers import compress
    except ImportError as error:
        hint = "install it with: pip install 'hiradix[zstd]'"
        raise ConfigError(f"{flag('compression')}: {error}; {hint}") from error
    return compress
