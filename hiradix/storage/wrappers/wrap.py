"""Puts wrappers around a backend, by the keys that every backend has. All but the retry are off by default."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hiradix.errors import ConfigError
from hiradix.settings import MAX_TIMEOUT_S, OPEN, OverHttp, Type, group, read, setting
from hiradix.storage.kit.options import flag
from hiradix.storage.protocol import StorageBackend, StorageContext, Traits
from hiradix.storage.wrappers import quantise
from hiradix.storage.wrappers.negative import NegativeCache
from hiradix.storage.wrappers.quota import QuotaConfig
from hiradix.storage.wrappers.retry import RetryingStorage

CODECS = ("none", "zstd")
QUANTISED = ("none", "fp8")
MAX_RETRIES, MAX_RETRY_WAIT_S = 100, 60.0


@dataclass(frozen=True)
class WrapConfig:
    """The wrappers of a backend and their settings."""

    retries: int = setting(
        "retries",
        Type.INTEGER,
        1,
        "a call that raised is made again so often, each wait twice the one before and all of them at most "
        "60 s; the deadline holds for all attempts together",
        maximum=MAX_RETRIES,
        over_http=OPEN,
    )
    retry_wait_s: float = setting(
        "retry_wait_s",
        Type.SECONDS,
        0.05,
        "wait before a call that raised is made again the first time",
        maximum=MAX_TIMEOUT_S,
        over_http=OPEN,
    )
    negative_ttl_s: float = setting(
        "negative_ttl_s",
        Type.SECONDS,
        0.0,
        "for so long a page that was absent is not asked for again; what other processes store meanwhile is "
        "found later. 0: off",
        over_http=OPEN,
    )
    compression: str = setting(
        "compression",
        Type.TEXT,
        "none",
        "`zstd`: lossless; for `redis`, `valkey` and `s3`; `pip install 'hiradix[zstd]'`",
        choices=CODECS,
        over_http=OPEN,
    )
    compression_level: int = setting(
        "compression_level",
        Type.INTEGER,
        1,
        "zstd's",
        minimum=1,
        maximum=22,
        over_http=OPEN,
    )
    quantise: str = setting(
        "quantise",
        Type.TEXT,
        "none",
        "`fp8`: **lossy**: pages take 0.52 (16 bit floats) or 0.26 (32 bit) of their size, on every backend: "
        "see [quantised pages](storage.md#quantised-pages)",
        choices=QUANTISED,
        over_http=OverHttp(refused=("fp8",)),
    )
    encryption_key_file: str = setting(
        "encryption_key_file",
        Type.FILE,
        "",
        "pages are encrypted: a file of 32 bytes, raw, hex or base64; `pip install 'hiradix[encryption]'`",
        over_http=OPEN,
    )
    quota: QuotaConfig = group(QuotaConfig)

    @staticmethod
    def from_mapping(values: Mapping[str, Any]) -> WrapConfig:
        """The wrappers' keys out of a backend's; raises ConfigError naming the bad one."""
        config = read(WrapConfig, values, flag)
        config.quota.check()
        retries, wait_s = config.retries, config.retry_wait_s
        all_s = wait_s * (2.0**retries - 1)
        if all_s > MAX_RETRY_WAIT_S:  # a worker sleeps on for a call that nobody waits for
            first = f"the first of {flag('retry_wait_s')} {wait_s:g}"
            raise ConfigError(
                f"{flag('retries')} {retries}: {retries} waits, each twice the one before, {first}, are "
                f"{all_s:.3g} s; at most {MAX_RETRY_WAIT_S:g} s"
            )
        return config


def coded(context: StorageContext, config: WrapConfig) -> StorageContext:
    """The same with names for what is stored: pages that do not come back exactly have their own."""
    if config.quantise == "none":
        return context
    fingerprint = dataclasses.replace(context.fingerprint, codec=quantise.CODEC)
    return dataclasses.replace(context, fingerprint=fingerprint)


def inner_context(context: StorageContext, config: WrapConfig) -> StorageContext:
    """The context of the wrapped backend: its pages are longer, or of any length. Raises ConfigError."""
    page_bytes, extra_bytes = context.page_bytes, 0
    if config.quantise != "none":
        page_bytes = quantise.coded_bytes(page_bytes, context.elements)
    if config.encryption_key_file:
        extra_bytes += module_of("encryption_key_file").OVERHEAD_BYTES
    if config.compression != "none":
        extra_bytes += module_of("compression").OVERHEAD_BYTES
    return dataclasses.replace(
        context, page_bytes=page_bytes + extra_bytes, ragged=config.compression != "none"
    )


def wrap(backend: StorageBackend, context: StorageContext, config: WrapConfig) -> StorageBackend:
    """`backend`, made from `inner_context`, in its wrappers. Raises ConfigError, having closed it."""
    try:
        if config.retries:
            backend = RetryingStorage(backend, config.retries, config.retry_wait_s)
        if config.encryption_key_file:
            module = module_of("encryption_key_file")
            key = module.read_key(config.encryption_key_file)
            backend = module.EncryptedStorage(backend, key, context.fingerprint.digest()[:32])
        if config.compression != "none":
            if not getattr(backend, "traits", Traits()).ragged:
                raise ConfigError(
                    f"{flag('compression')}: this backend stores pages of one length only; "
                    "redis, valkey and s3 take any"
                )
            backend = module_of("compression").CompressedStorage(backend, config.compression_level)
        if config.quantise != "none":
            backend = quantise.QuantisedStorage(backend, context.fingerprint, context.elements)
        if config.negative_ttl_s:
            backend = NegativeCache(backend, config.negative_ttl_s)
    except ConfigError:
        backend.close()
        raise
    return backend


def module_of(key: str) -> Any:
    """The module that a key of those above asks for; raises ConfigError with what to install where its
    package is missing."""
    name, extra = _MODULES[key]
    try:
        return importlib.import_module(f"hiradix.storage.wrappers.{name}")
    except ImportError as error:
        hint = f"install it with: pip install 'hiradix[{extra}]'"
        raise ConfigError(f"{flag(key)}: {error}; {hint}") from error


_MODULES = {"encryption_key_file": ("encrypt", "encryption"), "compression": ("compress", "zstd")}
"""Modules whose packages may be missing, and the extra that brings these."""
