"""Resolves names of models and adapters as vLLM does, and refuses models whose pages cannot be named."""

from __future__ import annotations

import logging
import os
from functools import lru_cache
from typing import Any

from hiradix.adapters.rope import DYNAMIC, LONG, unfixed
from hiradix.errors import ConfigError

logger = logging.getLogger(__name__)


def names_are_hub() -> bool:
    """Whether vLLM resolves the names of models and adapters at Hugging Face, and not at ModelScope."""
    return os.environ.get("VLLM_USE_MODELSCOPE", "").strip().lower() not in ("1", "true")


def local_place(name: str, revision: str | None = None, cache_dir: str | None = None) -> str:
    """The local folder to which ModelScope's client resolves `name`, as vLLM does; any other name, path or
    address unchanged."""
    if names_are_hub() or os.path.exists(name):
        return name
    try:
        return _of_modelscope(name, revision, cache_dir)
    except Exception as error:  # its releases raise errors of several kinds
        _warn_unknown(name, f"{type(error).__name__}: {error}")
        return name


@lru_cache(maxsize=1024)
def _of_modelscope(name: str, revision: str | None, cache_dir: str | None) -> str:
    """Cached, as each request of an adapter names it."""
    from modelscope.hub.snapshot_download import snapshot_download

    return str(snapshot_download(name, revision=revision, cache_dir=cache_dir, local_files_only=True))


@lru_cache(maxsize=1024)
def _warn_unknown(name: str, why: str) -> None:
    """Warn once for each name and reason."""
    logger.warning("%s is in no cache of ModelScope's here: it is known by its name alone: %s", name, why)


def refuse_ropes(model: Any) -> None:
    """Raise ConfigError for a rope whose factors depend on the other sequences of a batch: the KV of a prefix
    would not depend on the prefix alone.

    model: vLLM's ModelConfig. Only models that run through the Transformers backend have such ropes; vLLM's own
    have fixed factors.
    """
    is_foreign = getattr(model, "using_transformers_backend", None)
    if is_foreign is None or not is_foreign():
        return
    rope = unfixed(model.hf_text_config, model.max_model_len, (LONG, DYNAMIC))
    if rope is not None:
        raise ConfigError(
            f"--model-impl transformers: its rope {rope.kind} is chosen by the longest sequence of a batch; "
            f"--max-model-len {rope.trained} has all take the same"
        )
