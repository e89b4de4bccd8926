"""The reference engine: continuous batching of real models over paged KV, on CPU or GPU.

Names are loaded on first use, so importing the package costs neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hiradix.apps.engine.api import (
        EngineBusy,
        EngineConfig,
        EngineInfo,
        EngineStopped,
        Output,
        RequestError,
        SamplingParams,
        Scope,
        TokenLogprob,
        Usage,
    )
    from hiradix.apps.engine.async_engine import EngineThread
    from hiradix.apps.engine.engine import Engine
    from hiradix.apps.engine.tokenizer import Tokenizer

_HOME = {
    "Engine": "hiradix.apps.engine.engine",
    "EngineThread": "hiradix.apps.engine.async_engine",
    "Tokenizer": "hiradix.apps.engine.tokenizer",
}
__all__ = [
    "Engine",
    "EngineBusy",
    "EngineConfig",
    "EngineInfo",
    "EngineStopped",
    "EngineThread",
    "Output",
    "RequestError",
    "SamplingParams",
    "Scope",
    "TokenLogprob",
    "Tokenizer",
    "Usage",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME.get(name, "hiradix.apps.engine.api")), name)
