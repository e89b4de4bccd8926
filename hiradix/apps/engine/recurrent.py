"""Recurrent layers over a packed pass: convolutions, linear attention, anything that keeps one state.

Each such layer stays transformers' own. It is called once for each piece of a sequence, with a stand-in for
transformers' cache that has the state before the piece; decodes are called together. So nothing leaks from
one request into another, and a chunk continues where the last one ended.

No state is written while the pass runs: the new ones are kept aside until it counts (`commit`), as a pass
whose load back fails is run again, from the same states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from hiradix.errors import ConfigError, Misuse
from hiradix.memory import StateShape

NO_STATE = 0  # the slot that is never written: the state before the first token, all zeros


@dataclass(frozen=True)
class RankCut:
    """The rule by which a recurrent layer is cut over tensor parallel ranks. Its output projection is cut as
    all others are.

    fields: the config's that say how many heads, groups or channels there are, all of which must be divisible.
    rows: by parameter or submodule, the sizes of the parts that its rows consist of; a rank gets its share of
    each. numbers: attributes of the layer that count what a rank then has a share of. norm: of a submodule that
    normalises over the channels of all ranks.
    """

    fields: tuple[str, ...]
    rows: Callable[[Any], Mapping[str, tuple[int, ...]]]
    numbers: tuple[str, ...] = ()
    norm: str | None = None


@dataclass(frozen=True)
class Family:
    """The recurrent layers of one model type of transformers.

    kind: their name in the config's `layer_types`. module: a decoder layer's attribute that keeps the state.
    cache: the argument in which it takes transformers' cache. shape: of the states of so many layers.
    """

    kind: str
    module: str
    cache: str
    shape: Callable[[Any, int, torch.dtype], StateShape]
    rank_cut: RankCut


def _short_conv(config: Any, num_layers: int, dtype: torch.dtype) -> StateShape:
    return StateShape(num_layers, config.hidden_size, config.conv_L_cache - 1, conv_dtype=dtype, dtype=dtype)


def _short_conv_rows(layer: Any) -> Mapping[str, tuple[int, ...]]:
    channels = layer.conv.out_channels
    return {"in_proj": (channels, channels, channels), "conv": (channels,)}


def _gated_delta(config: Any, num_layers: int, dtype: torch.dtype) -> StateShape:
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    return StateShape(
        num_layers, 2 * keys + values, config.linear_conv_kernel_dim - 1, config.linear_num_value_heads,
        config.linear_key_head_dim, config.linear_value_head_dim, conv_dtype=dtype,
    )  # fmt: skip


def _gated_delta_rows(layer: Any) -> Mapping[str, tuple[int, ...]]:
    keys, values, heads = layer.key_dim, layer.value_dim, layer.num_v_heads
    rows = {"conv1d": (keys, keys, values), "dt_bias": (heads,), "A_log": (heads,)}
    if hasattr(layer, "in_proj_qkvz"):  # all of a key head is together
        return rows | {"in_proj_qkvz": (2 * keys + 2 * values,), "in_proj_ba": (2 * heads,)}
    projected = {"in_proj_qkv": (keys, keys, values), "in_proj_z": (values,)}
    return rows | projected | {"in_proj_b": (heads,), "in_proj_a": (heads,)}


def _mamba2(config: Any, num_layers: int, dtype: torch.dtype) -> StateShape:
    inner = config.mamba_n_heads * config.mamba_d_head
    conv = inner + 2 * config.mamba_n_groups * config.mamba_d_state
    return StateShape(
        num_layers, conv, config.mamba_d_conv - 1, config.mamba_n_heads, config.mamba_d_head,
        config.mamba_d_state, conv_dtype=dtype,
    )  # fmt: skip


def _mamba2_rows(layer: Any) -> Mapping[str, tuple[int, ...]]:
    inner, groups, heads = layer.intermediate_size, layer.n_groups * layer.ssm_state_size, layer.num_heads
    inputs = (inner, groups, groups)
    of_heads = dict.fromkeys(("dt_bias", "A_log", "D"), (heads,))
    return {"in_proj": (inner, *inputs, heads), "conv1d": inputs, **of_heads}


_CONV_CUT = RankCut(("hidden_size",), _short_conv_rows)
_DELTA_CUT = RankCut(
    ("linear_num_key_heads", "linear_num_value_heads"), _gated_delta_rows,
    ("num_v_heads", "num_k_heads", "key_dim", "value_dim", "conv_dim"),
)  # fmt: skip
_MAMBA2_CUT = RankCut(
    ("mamba_n_heads", "mamba_n_groups"), _mamba2_rows,
    ("num_heads", "n_groups", "intermediate_size", "conv_dim"), norm="norm",
)  # fmt: skip
FAMILIES = {
    "bamba": Family("linear_attention", "mamba", "cache_params", _mamba2, _MAMBA2_CUT),
    "granitemoehybrid": Family("linear_attention", "mamba", "cache_params", _mamba2, _MAMBA2_CUT),
    "lfm2": Family("conv", "conv", "past_key_values", _short_conv, _CONV_CUT),
    "lfm2_moe": Family("conv", "conv", "past_key_values", _short_conv, _CONV_CUT),
    "qwen3_5_text": Family("linear_attention", "linear_attn", "cache_params", _gated_delta, _DELTA_CUT),
    "qwen3_next": Family("linear_attention", "linear_attn", "cache_params", _gated_delta, _DELTA_CUT),
}


@dataclass(frozen=True)
class States:
    """The state of a model's recurrent layers, and the numbers of both kinds of layers."""

    shape: StateShape
    full_layers: tuple[int, ...]
    other_layers: tuple[int, ...]


def states_of(config: Any, dtype: torch.dtype, tp_size: int = 1) -> States | None:
    """The recurrent states of a model that mixes them with full attention, None for any other.

    tp_size: ranks, of which each has a share of a state's channels and heads.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        return None
    kinds = list(config.layer_types)
    if set(kinds) != {"full_attention", family.kind}:
        raise ConfigError(f"layer_types {sorted(set(kinds))}: full_attention and {family.kind} are needed")
    full, recurrent = (
        tuple(layer for layer, own in enumerate(kinds) if own == kind)
        for kind in ("full_attention", family.kind)
    )
    whole = family.shape(config, len(recurrent), dtype)
    own = replace(whole, conv_dim=whole.conv_dim // tp_size, num_heads=whole.num_heads // tp_size)
    return States(own, full, recurrent)


class StateBuffers(Protocol):
    """The part of a state pool that a forward pass uses; the getter waits on the layer's gate. As
    `KVBuffers`."""

    def get_arrays(self, layer: int, /) -> tuple[torch.Tensor, ...]: ...


@dataclass(frozen=True, slots=True)
class StatePool:
    """The pool of recurrent states, and the model's layers it has, in its order."""

    buffers: StateBuffers
    layers: Sequence[int]
    shape: StateShape


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """Rows [start, end) of a pass, the next tokens of one sequence.

    source: slot of the state before them; None: what the piece before this one left. targets: slots that get
    the state behind them.
    """

    start: int
    end: int
    source: int | None
    targets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Group:
    """Pieces of one length that are computed together.

    rows: of the pass, int64 [B, N]. sources: int64 [B]; None: the states that the group before left. kept,
    slots: int64 [K], which of the B new states go to which slots.
    """

    rows: torch.Tensor
    sources: torch.Tensor | None
    kept: torch.Tensor
    slots: torch.Tensor

    @staticmethod
    def of(pieces: Sequence[SequenceRows], device: torch.device) -> _Group:
        rows = torch.tensor([list(range(piece.start, piece.end)) for piece in pieces], device=device)
        is_first = pieces[0].source is not None
        sources = torch.tensor([piece.source for piece in pieces], device=device) if is_first else None
        pairs = [(row, slot) for row, piece in enumerate(pieces) for slot in piece.targets]
        kept, slots = torch.tensor(pairs, device=device).T
        return _Group(rows, sources, kept, slots)


class StatePass:
    """A pass's part over the state pool."""

    def __init__(self, pool: StatePool, sequences: Sequence[Sequence[SequenceRows]], device: torch.device):
        """sequences: the pieces of each, one behind the other."""
        self._pool = pool
        self._at = {layer: at for at, layer in enumerate(pool.layers)}
        decodes = [pieces[0] for pieces in sequences if pieces[-1].end - pieces[0].start == 1]
        others = [[p] for pieces in sequences if pieces[-1].end - pieces[0].start > 1 for p in pieces]
        self._groups = [_Group.of(group, device) for group in ([decodes] if decodes else []) + others]
        self._new: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # array, slots, values

    def run(self, layer: int, call: Call, packed: torch.Tensor) -> torch.Tensor:
        """The layer's output [1, T, H] of packed [1, T, H]; `call` runs it on rows [B, N, H]."""
        arrays = self._pool.buffers.get_arrays(self._at[layer])
        out = torch.empty_like(packed)
        states: StandIn | None = None
        for group in self._groups:
            if group.sources is not None:
                states = self._read(arrays, group.sources)
            if states is None:
                raise Misuse(f"rows {group.rows} continue nothing")
            out[0, group.rows] = call(packed[0, group.rows], states)
            for array, own in zip(arrays, states.arrays, strict=True):
                values = own.index_select(0, group.kept).view(-1, *array.shape[1:])
                self._new.append((array, group.slots, values))
        return out

    def commit(self) -> None:
        """Write the new states to their slots: the pass counts."""
        for array, slots, values in self._new:
            array.index_copy_(0, slots, values)
        self._new.clear()

    def _read(self, arrays: Sequence[torch.Tensor], sources: torch.Tensor) -> StandIn:
        """Copies of the states in these slots."""
        shape = self._pool.shape
        conv, *rest = (array.index_select(0, sources) for array in arrays)
        conv = conv.view(-1, shape.conv_dim, shape.conv_width)
        if not rest:
            return StandIn(conv, None)
        return StandIn(conv, rest[0].view(-1, shape.num_heads, shape.head_dim, shape.state_size))


class StandIn:
    """transformers' cache as one call of a recurrent layer uses it: states [B, ...], ours to write."""

    def __init__(self, conv: torch.Tensor, recurrent: torch.Tensor | None):
        self.conv_states = {0: conv}
        self.recurrent_states = {0: recurrent}
        self.record_past = False

    @property
    def arrays(self) -> list[torch.Tensor]:
        own = (self.conv_states[0], self.recurrent_states[0])
        return [array for array in own if array is not None]

    @property
    def layers(self) -> _Anywhere:
        return _Anywhere(self)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Always: before the first token it is all zeros, as convolutions are padded with."""
        return True

    def update_conv_state(self, new: torch.Tensor, layer_idx: int, **_: Any) -> torch.Tensor:
        """[B, C, width + N]: the inputs before `new` [B, C, N], and these; the last are kept."""
        width = self.conv_states[0].shape[-1]
        whole = torch.cat([self.conv_states[0].to(new.dtype), new], dim=-1)
        self.conv_states[0] = whole[..., -width:].to(self.conv_states[0].dtype)
        return whole

    def update_recurrent_state(self, new: torch.Tensor, layer_idx: int, **_: Any) -> torch.Tensor:
        own = self.recurrent_states[0]
        if own is None or own.shape != new.shape:
            raise Misuse(f"a state of {new.shape} for {own}")
        self.recurrent_states[0] = new.to(own.dtype)
        return new


Call = Callable[[torch.Tensor, StandIn], torch.Tensor]


class _Anywhere:
    """`layers[i]` of a cache that has one layer, whatever its number."""

    def __init__(self, layer: StandIn):
        self._layer = layer

    def __getitem__(self, layer: int) -> StandIn:
        return self._layer


class RecurrentLayer(torch.nn.Module):
    """Takes the place of transformers' module `inner`: runs it by way of the pass that `current_pass` has."""

    def __init__(self, inner: Any, cache: str, current_pass: CurrentPass):
        super().__init__()
        self.inner = inner
        self._cache = cache
        self._current_pass = current_pass

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        if self._current_pass.states is None:
            raise Misuse("a recurrent layer outside of a pass")

        def call(rows: torch.Tensor, states: StandIn) -> torch.Tensor:
            out: torch.Tensor = self.inner(rows, **{self._cache: states})
            return out

        found: torch.Tensor = self._current_pass.states.run(self.inner.layer_idx, call, hidden_states)
        return found


class CurrentPass:
    """The running pass, for a model's recurrent layers to find: their arguments have no room for it."""

    def __init__(self) -> None:
        self.states: StatePass | None = None


def recurrent_layers(model: torch.nn.Module, config: Any) -> list[tuple[str, Any]]:
    """The recurrent layers of `model`, each with its name; none where the model has no such."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        return []
    return [
        (name, module)
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == family.module and hasattr(module, "layer_idx")
    ]


def replace_recurrent(model: torch.nn.Module, config: Any, current_pass: CurrentPass) -> None:
    """Have the recurrent layers of `model` run over packed passes."""
    family = FAMILIES[config.model_type]
    for name, module in recurrent_layers(model, config):
        model.set_submodule(name, RecurrentLayer(module, family.cache, current_pass))
