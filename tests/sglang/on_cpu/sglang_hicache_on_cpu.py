"""An SGLang plugin with what SGLang lacks on a CPU: its own HiCache, for comparisons, windows, adapters.

torch.cpu's events and streams get CUDA's surface, host pools are not pinned, and the page copies of the
`direct` io backend are torch calls; so use `--hicache-io-backend direct`. hiradix needs none of that. Norms with
a gate and Mamba 2 are torch calls as well. The attention backend `torch_native` writes a hybrid pool's window
slots but reads by the numbers of full slots: here it reads them where they are.
"""

import contextlib
import functools
import inspect
import time

import torch


class Event:
    def __init__(self, enable_timing=False, blocking=False, interprocess=False):
        self.time_s = 0.0

    def record(self, stream=None):
        self.time_s = time.perf_counter()

    def wait(self, stream=None):
        pass

    def query(self):
        return True

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return max(0.0, (other.time_s - self.time_s) * 1e3)


class Stream:
    cuda_stream = 0

    def __init__(self, *_, **__):
        pass

    def synchronize(self):
        pass

    def wait_stream(self, stream):
        pass

    def wait_event(self, event):
        pass

    def record_event(self, event=None):
        event = event or Event()
        event.record()
        return event

    def query(self):
        return True


def transfer_kv_direct(src_layers, dst_layers, src_indices, dst_indices, page_size):
    source, target = src_indices.long(), dst_indices.long()
    for src, dst in zip(src_layers, dst_layers):
        dst[target] = src[source].reshape(dst[target].shape)


def transfer_kv_per_layer_direct_pf_lf(src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size):
    source, target = src_indices.long(), dst_indices.long()
    for src, dst in zip(src_ptrs, dst_ptrs):
        rows = src[source // page_size, layer_id, source % page_size]
        dst[target] = rows.reshape(dst[target].shape)


def transfer_kv_all_layer_direct_lf_pf(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size):
    source, target = src_indices.long(), dst_indices.long()
    num_layers = len(src_ptrs) // len(dst_ptrs)
    for array, dst in enumerate(dst_ptrs):
        for layer in range(num_layers):
            rows = src_ptrs[array * num_layers + layer][source]
            dst[target // page_size, layer, target % page_size] = rows.reshape(len(source), *dst.shape[3:])


COPIES = (transfer_kv_direct, transfer_kv_per_layer_direct_pf_lf, transfer_kv_all_layer_direct_lf_pf)


def activate():
    torch.cpu.Event, torch.cpu.Stream = Event, Stream
    stream = Stream()
    torch.cpu.current_stream = lambda device=None: stream
    torch.cpu.stream = lambda _=None: contextlib.nullcontext()
    _without_pinning()
    try:
        import sglang.srt.mem_cache.pool_host.mha as pools
    except ImportError:  # before 0.5.16
        import sglang.srt.mem_cache.memory_pool_host as pools
    for copy in COPIES:
        setattr(pools, copy.__name__, copy)
    pools._cuda_host_unregister = lambda *_, **__: None
    with contextlib.suppress(ImportError, AttributeError):  # older ones know no windows there
        _read_window_slots()
    with contextlib.suppress(ImportError, AttributeError):
        _gate_norms_in_torch()
    with contextlib.suppress(ImportError, AttributeError):
        from sgl_kernel.mamba2 import use

        use()


def _gate_norms_in_torch():
    """The norm behind a gated delta network's states, which is a kernel for GPUs alone."""
    from sglang.kernels.ops.attention.fla import fused_norm_gate

    def forward(self, x, g, residual=None, prenorm=False, residual_in_fp32=False):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight.float()
        gate = (
            torch.sigmoid(g.float()) if self.activation == "sigmoid" else torch.nn.functional.silu(g.float())
        )
        return (wide * gate).to(x.dtype)

    fused_norm_gate.FusedRMSNormGated.forward = forward


def _read_window_slots():
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend as Backend

    def reading(original):
        signature = inspect.signature(original)

        def run(self, *arguments, **named):
            bound = signature.bind(self, *arguments, **named)
            bound.apply_defaults()
            window = bound.arguments["sliding_window_size"]
            if self.use_sliding_window_kv_pool and window is not None and window > -1:
                slots = bound.arguments["req_to_token"].long()
                bound.arguments["req_to_token"] = self.token_to_kv_pool.translate_loc_from_full_to_swa(slots)
            return original(*bound.args, **bound.kwargs)

        return run

    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        setattr(Backend, name, reading(getattr(Backend, name)))


def _without_pinning():
    import sglang.srt.mem_cache.pool_host.base as base
    import sglang.srt.mem_cache.pool_host.common as common

    ranges = getattr(common, "_CUDA_HOST_REGISTERED_RANGES_ATTR", "_registered")
    common._cuda_host_register = lambda buffer, _=None: setattr(buffer, ranges, [])
    if hasattr(common, "_cuda_host_unregister"):
        common._cuda_host_unregister = lambda *_, **__: None
    original = base.HostKVCache.__init__
    signature = inspect.signature(original)

    def without_pinning(self, *arguments, **named):
        bound = signature.bind(self, *arguments, **named)
        bound.arguments["pin_memory"] = False
        return original(*bound.args, **bound.kwargs)

    base.HostKVCache.__init__ = without_pinning
    torch.Tensor.pin_memory = lambda self, *_: self  # as SGLang's adapters (LoRA) ask for it
    for name in ("tensor", "zeros", "empty"):
        setattr(torch, name, _unpinned(getattr(torch, name)))


def _unpinned(make):
    @functools.wraps(make)
    def unpinned(*arguments, pin_memory=False, **named):
        return make(*arguments, **named)

    return unpinned
