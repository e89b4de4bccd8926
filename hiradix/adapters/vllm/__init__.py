"""hiradix as vLLM's KV connector.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "HiRadixConnector",
        "kv_connector_module_path": "hiradix.adapters.vllm", "kv_role": "kv_both",
        "kv_connector_extra_config": {"hicache_size": 64}}'

and an admission policy for its scheduler, with the connector or without:

    vllm serve MODEL --scheduler-cls hiradix.adapters.vllm.HiRadixScheduler

vLLM has no tree and calls a connector in two roles. `scheduler` (what may be promised) and `worker` (what is
moved) know nothing of vLLM and share nothing but `orders`; `connector` and `scheduler_class` are what vLLM
loads, the only modules here that import it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hiradix.adapters.vllm.connector import HiRadixConnector
    from hiradix.adapters.vllm.scheduler_class import HiRadixScheduler

__all__ = ["HiRadixConnector", "HiRadixScheduler"]
_MODULES = {"HiRadixConnector": "connector", "HiRadixScheduler": "scheduler_class"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hiradix.adapters.vllm import support

    support.require_known_release()
    if name == "HiRadixScheduler":
        support.require_known_scheduler()
    try:
        found = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    except ImportError as error:
        raise support.unsupported(error, name) from error
    globals()[name] = found  # vLLM asks for it again and again
    return found
