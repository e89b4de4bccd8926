"""Which wrappers a backend gets, from the keys every backend has. All but the retry are off by default."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hiradix.errors import ConfigError
from hiradix.storage.negative import NegativeCache
from hiradix.storage.options import Options, flag
from hiradix.storage.protocol import StorageBackend, StorageContext, Traits
from hiradix.storage.quota import QUOTA_KEYS, QuotaConfig
from hiradix.storage.retry import RetryingStorage

WRAP_KEYS = (
    "retries",
    "retry_wait_s",
    "negative_ttl_s",
    "compression",
    "compression_level",
    "encryption_key_file",
    *QUOTA_KEYS,
)
CODECS = ("none", "zstd")


@dataclass(frozen=True)
class WrapConfig:
    """retries, retry_wait_s: of calls that raise. negative_ttl_s: how long absence is believed; 0 not at all.
    """

    retries: int = 1
    retry_wait_s: float = 0.05
    negative_ttl_s: float = 0.0
    compression: str = "none"
    compression_level: int = 1
    encryption_key_file: str = ""
    quota: QuotaConfig = QuotaConfig()

    @staticmethod
    def from_mapping(values: Mapping[str, Any]) -> WrapConfig:
        """The wrappers' keys out of a backend's; raises ConfigError naming the bad one."""
        options, default = Options(values), WrapConfig()
        level = options.integer("compression_level", default.compression_level)
        if not 1 <= level <= 22:
            raise ConfigError(f"{flag('compression_level')} must be 1 to 22, got {level}")
        return WrapConfig(
            retries=options.integer("retries", default.retries),
            retry_wait_s=options.number("retry_wait_s", default.retry_wait_s),
            negative_ttl_s=options.number("negative_ttl_s", default.negative_ttl_s),
            compression=options.choice("compression", default.compression, CODECS),
            compression_level=level,
            encryption_key_file=options.text("encryption_key_file", ""),
            quota=QuotaConfig.from_options(options),
        )


def inner_context(context: StorageContext, config: WrapConfig) -> StorageContext:
    """What the wrapped backend is made from: its pages are longer, or of any length."""
    extra_bytes = 0
    if config.encryption_key_file:
        extra_bytes += encryption().OVERHEAD_BYTES
    if config.compression != "none":
        extra_bytes += _compression().OVERHEAD_BYTES
    return dataclasses.replace(
        context, page_bytes=context.page_bytes + extra_bytes, ragged=config.compression != "none"
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
        if config.negative_ttl_s:
            backend = NegativeCache(backend, config.negative_ttl_s)
    except ConfigError:
        backend.close()
        raise
    return backend


def encryption() -> Any:
    """The module `encrypt`; raises ConfigError with what to install where its package is missing."""
    try:
        from hiradix.storage import encrypt
    except ImportError as error:
        hint = "install it with: pip install 'hiradix[encryption]'"
        raise ConfigError(f"{flag('encryption_key_file')}: {error}; {hint}") from error
    return encrypt


def _compression() -> Any:
    try:
        from hiradix.storage import compress
    except ImportError as error:
        hint = "install it with: pip install 'hiradix[zstd]'"
        raise ConfigError(f"{flag('compression')}: {error}; {hint}") from error
    return compress
