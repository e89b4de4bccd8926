"""hiradix as vLLM's KV connector.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "HiRadixConnector",
        "kv_connector_module_path": "hiradix.adapters.vllm", "kv_role": "kv_both",
        "kv_connector_extra_config": {"hicache_size": 64}}'

vLLM has no tree and calls a connector in two roles. `scheduler` (what may be promised) and `worker` (what is
moved) know nothing of vLLM and share nothing but `orders`; `connector` is the class vLLM loads, the only
module here that imports vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hiradix.adapters.vllm.connector import HiRadixConnector

__all__ = ["HiRadixConnector"]


def __getattr__(name: str) -> Any:
    if name == "HiRadixConnector":
        from hiradix.adapters.vllm import support

        support.require_known_release()
        try:
            from hiradix.adapters.vllm.connector import HiRadixConnector
        except ImportError as error:
            from hiradix.adapters.vllm.support import unsupported

            raise unsupported(error) from error
        globals()[name] = HiRadixConnector  # vLLM asks for it again and again
        return HiRadixConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
