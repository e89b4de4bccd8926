"""The kernels of gated delta networks in torch: a causal convolution with its tail, and the delta rule.

States are [heads, value, key] in float32. Every kernel writes the slots that it is given, in place.
"""

import torch
from torch.nn.functional import silu, softplus

from sgl_kernel import _define


def causal_conv1d_fn_cpu(
    x, weight, bias=None, query_start_loc=None, cache_indices=None, has_initial_state=None, conv_states=None,
    activation="silu", **_,
):  # fmt: skip
    """x [dim, tokens of all sequences]; conv_states [slots, dim, width - 1]."""
    out, ends = torch.empty_like(x), query_start_loc.tolist()
    for i, slot in enumerate(cache_indices.tolist()):
        tail = conv_states[slot]
        before = tail if bool(has_initial_state[i]) else torch.zeros_like(tail)
        out[:, ends[i] : ends[i + 1]], tail[:] = _convolve(
            x[:, ends[i] : ends[i + 1]], before, weight, bias, activation
        )
    return out


def causal_conv1d_update_cpu(
    x, conv_states, weight, bias=None, activation="silu", conv_state_indices=None, **_
):
    """x [sequences, dim]: one token each."""
    out = torch.empty_like(x)
    for i, slot in enumerate(conv_state_indices.tolist()):
        tail = conv_states[slot]
        computed, tail[:] = _convolve(x[i][:, None], tail.clone(), weight, bias, activation)
        out[i] = computed[:, 0]
    return out


def _convolve(x, before, weight, bias, activation):
    width = weight.shape[-1]
    whole = torch.cat([before.to(x.dtype), x], dim=1)
    out = (whole.unfold(1, width, 1) * weight[:, None, :]).sum(-1)
    if bias is not None:
        out = out + bias[:, None]
    return (silu(out) if activation in ("silu", "swish") else out), whole[:, whole.shape[1] - width + 1 :]


def chunk_gated_delta_rule_cpu(q, k, v, g, beta, initial_state, initial_state_indices, cu_seqlens, **_):
    """q, k [1, tokens, heads, K]; v [1, tokens, value heads, V]; g, beta [1, tokens, value heads]."""
    out, ends = torch.empty_like(v), cu_seqlens.tolist()
    for i, slot in enumerate(initial_state_indices.tolist()):
        tokens = slice(ends[i], ends[i + 1])
        out[0, tokens], state = _delta(
            q[0, tokens], k[0, tokens], v[0, tokens], g[0, tokens], beta[0, tokens], initial_state[slot]
        )
        initial_state[slot] = state
    return out, None, None


def _delta(q, k, v, g, beta, state):
    state, repeat = state.float(), v.shape[1] // k.shape[1]
    q, k = (_unit(x.float()).repeat_interleave(repeat, 1) for x in (q, k))
    q, v, decay = q * q.shape[-1] ** -0.5, v.float(), g.float().exp()
    outs = []
    for t in range(len(v)):
        state = state * decay[t][:, None, None]
        delta = (v[t] - (state * k[t][:, None, :]).sum(-1)) * beta[t].float()[:, None]
        state = state + delta[:, :, None] * k[t][:, None, :]
        outs.append((state * q[t][:, None, :]).sum(-1))
    return torch.stack(outs), state


def _unit(x):
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _gating(A_log, a, b, dt_bias):
    g = -A_log.float().exp() * softplus(a.float() + dt_bias.float())
    return g[None], b.float().sigmoid()[None]


def _update(A_log, dt_bias, q, k, v, a, b, initial_state_source, initial_state_indices, cu_seqlens,
            use_qk_l2norm_in_kernel, softplus_beta, softplus_threshold):  # fmt: skip
    g, beta = _gating(A_log, a, b, dt_bias)
    return chunk_gated_delta_rule_cpu(
        q, k, v, g, beta, initial_state_source, initial_state_indices, cu_seqlens
    )[0]


_define("fused_gdn_gating_cpu(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)", _gating)
_define(
    "fused_sigmoid_gating_delta_rule_update_cpu(Tensor A_log, Tensor dt_bias, Tensor q, Tensor k, Tensor v, "
    "Tensor a, Tensor b, Tensor(a!) initial_state_source, Tensor initial_state_indices, Tensor cu_seqlens, "
    "bool use_qk_l2norm_in_kernel, float softplus_beta, float softplus_threshold) -> Tensor",
    _update,
)
