"""Backends by name. Nothing is imported until its name is asked for."""

from __future__ import annotations

import importlib
import logging
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, cast

from hiradix.errors import ConfigError, Unreachable
from hiradix.storage.kit.reach import is_unreachable
from hiradix.storage.protocol import StorageBackend, StorageContext, Traits

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "hiradix.storage"
FLAG = "--hicache-storage-backend"
CALLS = ("exists", "get", "put", "delete", "clear", "close")


@dataclass(frozen=True)
class BackendSpec:
    """The class of a backend ("module:Class"), and the package to install when its imports fail."""

    target: str
    install: str = ""


_SGLANG = (
    "hf3fs", "aibrix", "eic", "simm", "mori", "tensorcast", "npu_memcache", "seaweedfs", "infinistore",
)  # fmt: skip
_REDIS = BackendSpec("hiradix.storage.backends.redis.backend:RedisBackend", "pip install 'hiradix[redis]'")
_registered: dict[str, BackendSpec] = {
    "disk": BackendSpec("hiradix.storage.backends.disk:DiskBackend"),
    # FileBackend of backends/file, unless `naming` asks for SGLang's files
    "file": BackendSpec("hiradix.storage.backends.sglang.files:FileByNaming"),
    "redis": _REDIS,
    "valkey": _REDIS,
    "s3": BackendSpec("hiradix.storage.backends.s3.backend:S3Backend", "pip install 'hiradix[s3]'"),
    "mooncake": BackendSpec(
        "hiradix.storage.backends.mooncake.backend:MooncakeBackend", "pip install 'hiradix[mooncake]'"
    ),
    "nixl": BackendSpec("hiradix.storage.backends.nixl.backend:NixlBackend", "pip install 'hiradix[nixl]'"),
    "tier": BackendSpec("hiradix.storage.backends.tier.backend:TierBackend"),
    "dynamic": BackendSpec("hiradix.storage.backends.sglang.host:DynamicBackend"),
} | {name: BackendSpec(f"hiradix.storage.backends.sglang.known:{name}") for name in _SGLANG}


def register_storage_backend(name: str, target: str, install: str = "") -> None:
    """Make `name` stand for the class `target` ("package.module:Class"), made as `cls(context)`.

    install: a command for the error message when the class's imports are missing. An existing name is
    replaced with a warning.

    >>> register_storage_backend("vault", "vault_pages:VaultBackend", "pip install vault-pages")
    >>> "vault" in storage_backend_names()
    True
    >>> load_storage_backend("vault")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    hiradix.errors.ConfigError: ... cannot import vault_pages: ...; install it with: pip install vault-pages
    """
    module, _, attribute = target.partition(":")
    if not name or not module or not attribute:
        raise ConfigError(f"storage backend {name!r}: expected 'module:Class', got {target!r}")
    if name in _registered:
        logger.warning("storage backend %s is registered again: %s", name, target)
    _registered[name] = BackendSpec(target, install)


def storage_backend_names() -> list[str]:
    """Names that can be made, sorted: ours, registered ones and installed entry points."""
    return sorted({*_registered, *(entry.name for entry in entry_points(group=ENTRY_POINT_GROUP))})


def _spec(name: str) -> BackendSpec:
    if name in _registered:
        return _registered[name]
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if entry.name == name:
            module, _, attribute = entry.value.partition("[")[0].partition(":")  # [extras]: whoever installs
            return BackendSpec(f"{module.strip()}:{attribute.strip()}")
    known = ", ".join(storage_backend_names())
    raise ConfigError(f"{FLAG} {name}: unknown storage backend; available: {known}")


def load_storage_backend(name: str) -> type[StorageBackend]:
    """The class behind `name`. Raises ConfigError that says what is wrong and, where known, what to install."""
    spec = _spec(name)
    module_name, _, attribute = spec.target.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{FLAG} {name}: expected 'module:Class', got {spec.target!r}")
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part, None)
        lacking = _lacking(found)
    except (Exception, SystemExit) as error:  # a module may do anything, above all where a library is missing
        hint = f"; install it with: {spec.install}" if spec.install else ""
        raise ConfigError(
            f"{FLAG} {name}: cannot import {module_name}: {_import_failure(error)}{hint}"
        ) from error
    if found is None:
        raise ConfigError(f"{FLAG} {name}: no class {attribute} in module {module_name}")
    if not callable(found) or lacking:
        raise ConfigError(
            f"{FLAG} {name}: {spec.target} is no storage backend, it lacks {', '.join(lacking)}"
        )
    return cast(type[StorageBackend], found)


def _lacking(found: object) -> list[str]:
    return [call for call in CALLS if not callable(getattr(found, call, None))]


def _import_failure(error: BaseException) -> str:
    """The error as text; with its type unless it is an ImportError."""
    return str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"


def create_storage_backend(name: str, context: StorageContext) -> StorageBackend:
    """A new backend, unguarded. Raises ConfigError; whatever else its constructor raises becomes one.

    Unreachable, which is one, where the constructor's error says that the store does not answer now.
    """
    backend_class = load_storage_backend(name)
    try:
        backend: StorageBackend = backend_class(context)  # type: ignore[call-arg]
    except ConfigError:
        raise
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # constructors may raise anything, and panic; the start must say whose did
        kind = Unreachable if is_unreachable(error) else ConfigError
        raise kind(f"{FLAG} {name}: {type(error).__name__}: {error}") from error
    if fault := _fault_of(backend):
        with suppress(Exception):
            backend.close()
        raise ConfigError(f"{FLAG} {name}: {fault}")
    return backend


def _fault_of(backend: object) -> str:
    """The reason why the guard could not work with a made backend; "" if it can."""
    try:
        lacking, traits = _lacking(backend), getattr(backend, "traits", Traits())
    except Exception as error:  # as above
        return f"{type(error).__name__}: {error}"
    if lacking:
        return f"{type(backend).__name__} is no storage backend, it lacks {', '.join(lacking)}"
    if not isinstance(traits, Traits):
        return f"its traits must be Traits, not {type(traits).__name__}"
    return "a direct backend must verify its pages" if traits.direct and not traits.verifies else ""
