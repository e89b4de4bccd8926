"""What vLLM takes names for, and models whose pages nobody can name."""

from __future__ import annotations

import logging
import os
from functools import lru_cache
from typing import Any

from hiradix.adapters.rope import DYNAMIC, LONG, unfixed
from hiradix.errors import ConfigError

logger = logging.getLogger(__name__)


def names_are_hub() -> bool:
    """Whether vLLM takes the names of models and adapters for Hugging Face's."""
    return os.environ.get("VLLM_USE_MODELSCOPE", "").strip().lower() not in ("1", "true")


def local_place(name: str, revision: str | None = None, cache_dir: str | None = None) -> str:
    """The folder that vLLM takes a name of ModelScope's for, as its own client finds it on this machine; any
    other name, path or address as it is."""
    if names_are_hub() or os.path.exists(name):
        return name
    try:
        return _of_modelscope(name, revision, cache_dir)
    except Exception as error:  # its releases raise errors of several kinds
        _warn_unknown(name, f"{type(error).__name__}: {error}")
        return name


@lru_cache(maxsize=1024)
def _of_modelscope(name: str, revision: str | None, cache_dir: str | None) -> str:
    """Asked once: requests of an adapter name it each time."""
    from modelscope.hub.snapshot_download import snapshot_download

    return str(snapshot_download(name, revision=revision, cache_dir=cache_dir, local_files_only=True))


@lru_cache(maxsize=1024)
def _warn_unknown(name: str, why: str) -> None:
    """Once for each."""
    logger.warning("%s is in no cache of ModelScope's here: it is known by its name alone: %s", name, why)


def refuse_ropes(model: Any) -> None:
    """Raise ConfigError for a rope whose factors a batch decides, so that no prefix has KV of its own.

    model: vLLM's ModelConfig. Those of Transformers, for models that vLLM has no code for, do; vLLM's own
    have fixed ones.
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
