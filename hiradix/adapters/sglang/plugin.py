"""The plugin that SGLang loads from the entry-point group `sglang.srt.plugins`, in every process it starts.

It is there wherever hiradix is installed, so it imports nothing of SGLang or torch until it is called, and
the cache only when SGLang asks for it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any, get_type_hints

NAME = "hiradix"
_REGISTRY = "sglang.srt.mem_cache.registry"


def activate() -> None:
    """Register the backend name `hiradix`, and have the flags take our storage backends and policies.

    May be called again. Raises ConfigError, which SGLang logs, where this SGLang has no registry of caches.
    """
    from hiradix.adapters.sglang.support import installed_version, unsupported_version

    try:
        registry = importlib.import_module(_REGISTRY)
    except ImportError as error:
        raise unsupported_version(installed_version(), f"it has no {_REGISTRY}") from error
    if NAME not in registry.registered_radix_cache_backends():
        registry.register_radix_cache_backend(NAME, make_cache)
    offer_choices()


def make_cache(context: Any) -> Any:
    """SGLang's factory: its TreeCacheBuildContext in, a prefix cache of the API it speaks out.

    Raises ConfigError naming the version of an SGLang that lacks what the cache uses of it, and the pieces.
    """
    from hiradix.adapters.sglang import support
    from hiradix.adapters.sglang.support import installed_version, unsupported_version, warn_if_untested

    support.require_known_release()
    warn_if_untested()
    try:
        from hiradix.adapters.sglang.cache_factory import build_cache

        return build_cache(context)
    except ImportError as error:
        if not (error.name or "").startswith("sglang"):
            raise
        raise unsupported_version(installed_version(), str(error)) from error


def offer_choices() -> None:
    """Have SGLang's command line take the names of our backends and policies. No-op where it checks none."""
    from hiradix.policy.eviction import eviction_policies
    from hiradix.storage.registry import storage_backend_names

    _extend("hicache_storage_backend", storage_backend_names())
    _extend("radix_eviction_policy", eviction_policies())


def _extend(flag: str, names: Iterable[str]) -> None:
    try:
        flags = importlib.import_module("sglang.srt.server_args").ServerArgs
        annotation = get_type_hints(flags, include_extras=True)[flag]
    except (ImportError, AttributeError, KeyError, NameError):
        return  # an SGLang that keeps its flags elsewhere: its admin API and its Engine take any name
    for argument in getattr(annotation, "__metadata__", ()):
        choices = getattr(argument, "choices", None)
        if choices is not None:
            choices.extend(sorted(set(names) - set(choices)))
