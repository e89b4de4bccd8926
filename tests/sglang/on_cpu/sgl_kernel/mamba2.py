"""The kernels of Mamba 2 in torch, one token after the other, as SGLang's mixer calls its Triton ones.

States are [heads, head dim, state] and are written in place, in the slots that a call names.
"""

import torch
from torch.nn.functional import softplus

from sgl_kernel.mamba import causal_conv1d_fn_cpu, causal_conv1d_update_cpu


def use():
    """Have SGLang's mixer call these."""
    from sglang.srt.layers.attention.mamba import mamba

    for suffix in ("", "_triton"):
        setattr(mamba, f"causal_conv1d_fn{suffix}", causal_conv1d_fn_cpu)
        setattr(mamba, f"causal_conv1d_update{suffix}", causal_conv1d_update_cpu)
    mamba.mamba_chunk_scan_combined = mamba_chunk_scan_combined
    mamba.selective_state_update = selective_state_update


def mamba_chunk_scan_combined(
    x, dt, A, B, C, D=None, dt_bias=None, cu_seqlens=None, initial_states=None, out=None, **_
):
    """x [1, tokens, heads, dim]; dt [1, tokens, heads]; B, C [1, tokens, groups, state]. Writes `out`, which is
    like x, and returns, between two that are not made here, the state behind each sequence."""
    ends, states = cu_seqlens.tolist(), []
    for i in range(len(ends) - 1):
        state = (
            torch.zeros(*x.shape[2:], B.shape[-1]) if initial_states is None else initial_states[i].float()
        )
        for t in range(ends[i], ends[i + 1]):
            state, out[0, t] = _next(
                state, x[0, t], dt[0, t][:, None], A[:, None], B[0, t], C[0, t], D, dt_bias
            )
        states.append(state)
    return None, torch.stack(states), None


def selective_state_update(
    state, x, dt, A, B, C, D=None, dt_bias=None, state_batch_indices=None, out=None, **_
):
    """One token of each sequence: x, dt [sequences, heads, dim]; what is the same for a head is its first."""
    for i, slot in enumerate(state_batch_indices.tolist()):
        state[slot], out[i] = _next(
            state[slot].float(), x[i], dt[i, :, :1], A[:, :1, 0], B[i], C[i], D[:, 0], dt_bias[:, 0]
        )


def _next(state, x, dt, A, B, C, D, dt_bias):
    """The state [heads, dim, state] behind a token, and the token's output [heads, dim]. dt, A [heads, 1]."""
    dt = softplus(dt.float() + dt_bias.float()[:, None])
    B, C = (one.float().repeat_interleave(len(x) // len(one), 0) for one in (B, C))
    state = state * (dt * A.float()).exp()[..., None] + (dt * x.float())[..., None] * B[:, None]
    return state, (state * C[:, None]).sum(-1) + D.float()[:, None] * x.float()
