"""SGLang's CPU kernels in torch: those that a dense text model calls. There is no CPU wheel of sgl-kernel.

Every other name imports, and raises when it is called.
"""

import torch


def copy_all_layer_kv_cache_cpu(k_buffers, v_buffers, tgt_loc, src_loc):
    for buffer in [*k_buffers, *v_buffers]:
        buffer[tgt_loc] = buffer[src_loc]


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start, end, out_cache_loc, pool_len):
    at = 0
    for i in range(req_pool_indices.shape[0]):
        row, first, last = int(req_pool_indices[i]), int(start[i]), int(end[i])
        req_to_token[row, first:last] = out_cache_loc[at : at + last - first].to(req_to_token.dtype)
        at += last - first


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_, **__):
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU form here")

    return missing


_library = torch.library.Library("sgl_kernel", "DEF")


def _define(schema, call):
    _library.define(schema)
    _library.impl(schema.partition("(")[0], call, "CompositeExplicitAutograd")


_define("init_cpu_threads_env(str cpu_ids) -> str", lambda cpu_ids: f"threads on {cpu_ids}")
_define("initialize(int size, int rank) -> ()", lambda size, rank: None)
