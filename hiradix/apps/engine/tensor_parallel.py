"""Tensor parallel models: each rank computes its share of the heads and of the hidden layer, and they add up.

Query, key, value, gate and up projections are cut by rows of their weights (by output), the output and down
projections by columns (by input), whose partial results are added over the ranks. Of recurrent layers each rank
has a share of the heads or channels, with their states. Embeddings, experts, norms and the output layer are
whole on every rank, so every rank has the same logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.nn.functional import linear, silu

from hiradix.apps.engine.recurrent import FAMILIES, RankCut, recurrent_layers
from hiradix.cache import least
from hiradix.errors import ConfigError, Misuse
from hiradix.memory import DevicePool
from hiradix.transfer import LoadFailed
from hiradix.transfer.process_group import ProcessGroup

CUT_BY_OUTPUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
CUT_BY_INPUT = ("o_proj", "out_proj", "down_proj")


class SummedLinear(torch.nn.Module):
    """A linear layer that has a share of its inputs: the results of all ranks are added, then the bias."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, add: Callable[[torch.Tensor], torch.Tensor]
    ):
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)
        self._add = add

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out = self._add(linear(inputs, self.weight).contiguous())
        return out if self.bias is None else out + self.bias


class SharedNorm(torch.nn.Module):
    """A gated norm over channels of which each rank has a share, as Mamba 2 has behind its heads."""

    def __init__(self, weight: torch.Tensor, epsilon: float, group: ProcessGroup):
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self._epsilon = epsilon
        self._group = group

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        wide = hidden_states.float()
        if gate is not None:
            wide = wide * silu(gate.float())
        squares = self._group.add(wide.square().mean(-1, keepdim=True).contiguous())
        wide = wide * torch.rsqrt(squares / self._group.size + self._epsilon)
        return self.weight * wide.to(hidden_states.dtype)


def check_divisible(config: Any, size: int) -> None:
    """Raise ConfigError unless the model's heads and hidden layer can be cut into `size` equal parts."""
    if getattr(config, "kv_lora_rank", None):
        raise ConfigError(f"tp_size={size}: models with latent attention are not cut over ranks here")
    family = FAMILIES.get(config.model_type)
    recurrent = () if family is None else family.rank_cut.fields
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", *recurrent):
        if getattr(config, name) % size:
            raise ConfigError(f"tp_size={size}: the model's {name} is {getattr(config, name)}")


def cut(model: torch.nn.Module, config: Any, group: ProcessGroup) -> None:
    """Leave `model`, loaded whole, with this rank's share of its weights; the rest is freed."""
    for _, layer in recurrent_layers(model, config):
        _cut_recurrent(layer, FAMILIES[config.model_type].rank_cut, group)
    for name, module in list(model.named_modules()):
        kind = name.rpartition(".")[2]
        if kind in CUT_BY_OUTPUT:
            if not isinstance(module, torch.nn.Linear):
                raise Misuse(f"{name} is a {type(module).__name__}")
            module.weight = torch.nn.Parameter(_part(module.weight, 0, group), requires_grad=False)
            module.out_features = len(module.weight)
            if module.bias is not None:
                module.bias = torch.nn.Parameter(_part(module.bias, 0, group), requires_grad=False)
        elif kind in CUT_BY_INPUT:
            if not isinstance(module, torch.nn.Linear):
                raise Misuse(f"{name} is a {type(module).__name__}")
            bias = None if module.bias is None else module.bias.detach()
            summed = SummedLinear(_part(module.weight, 1, group), bias, group.add)
            model.set_submodule(name, summed)


def _cut_recurrent(layer: Any, rank_cut: RankCut, group: ProcessGroup) -> None:
    for name, parts in rank_cut.rows(layer).items():
        own = getattr(layer, name)
        if isinstance(own, torch.nn.Parameter):
            setattr(layer, name, _rows(own, parts, group))
            continue
        own.weight = _rows(own.weight, parts, group)
        if own.bias is not None:
            own.bias = _rows(own.bias, parts, group)
        if isinstance(own, torch.nn.Conv1d):
            own.in_channels = own.out_channels = own.groups = len(own.weight)
        else:
            own.out_features = len(own.weight)
    if rank_cut.norm is not None:
        norm = getattr(layer, rank_cut.norm)
        shared = SharedNorm(_part(norm.weight, 0, group), norm.variance_epsilon, group)
        setattr(layer, rank_cut.norm, shared)
    for name in rank_cut.numbers:
        setattr(layer, name, getattr(layer, name) // group.size)


def _rows(weight: torch.Tensor, parts: tuple[int, ...], group: ProcessGroup) -> torch.nn.Parameter:
    """This rank's share of each of the parts that rows consist of."""
    if sum(parts) != len(weight):
        raise Misuse(f"{len(weight)} rows in parts of {parts}")
    begins = accumulate(parts, initial=0)
    shares = [_part(weight[at : at + size], 0, group) for at, size in zip(begins, parts, strict=False)]
    return torch.nn.Parameter(torch.cat(shares), requires_grad=False)


def _part(weight: torch.Tensor, dim: int, group: ProcessGroup) -> torch.Tensor:
    return weight.detach().chunk(group.size, dim)[group.rank].clone()


class LoadGates:
    """The load backs that the next passes wait for, and what becomes of a pass when one of them failed.

    With ranks, a pass goes on to its end whatever its loads do, since the other ranks wait in its sums; then
    the ranks agree on whether it counts.
    """

    def __init__(self, gate: Any, group: ProcessGroup | None):
        self._gate = gate
        self._group = group
        self._slots: tuple[int, ...] = ()

    def add(self, slot: int) -> None:
        """Add a result of this step's `ready_to_load_host_cache`; a negative one means that nothing is
        loading, and clears all."""
        if slot < 0:
            self._slots = ()
        elif slot not in self._slots:
            self._slots += (slot,)

    @property
    def is_waiting(self) -> bool:
        """Whether the next pass waits for a load."""
        return bool(self._slots)

    def run(
        self, forward: Callable[[Sequence[PassBuffers]], torch.Tensor], pools: Sequence[DevicePool]
    ) -> torch.Tensor | None:
        """Run `forward`, whose layers wait for their loads, and return its result; None if a load failed, on
        any rank."""
        if self._gate is not None:
            self._gate.set_consumer(*self._slots)
        if self._group is None:
            try:
                out = forward(pools)
            except LoadFailed:
                self._keep([self._gate.error(slot) is None for slot in self._slots])
                return None
        else:
            buffers = [UngatedOnceFailed(pool) for pool in pools]
            out = forward(buffers)
            good = [int(self._gate is None or self._gate.error(slot) is None) for slot in self._slots]
            failed = any(own.failed for own in buffers)
            arrived, *good = least(self._group.least, int(not failed), *good)
            if not arrived:
                self._keep(good)
                return None
        self._slots = ()
        return out

    def _keep(self, good: list[bool] | list[int]) -> None:
        self._slots = tuple(slot for slot, is_good in zip(self._slots, good, strict=True) if is_good)


class UngatedOnceFailed:
    """A pool's buffers, which wait for their loads until one has failed."""

    def __init__(self, pool: DevicePool):
        self.page_size = pool.page_size
        self.failed = False
        self._pool = pool
        self._arrays = [pool.array(spec.name) for spec in pool.shape.arrays]

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        self._wait(self._pool.get_key_buffer, layer)
        return self._pool.k_buffer[layer]

    def get_value_buffer(self, layer: int) -> torch.Tensor:
        self._wait(self._pool.get_value_buffer, layer)
        return self._pool.v_buffer[layer]

    def get_arrays(self, layer: int) -> tuple[torch.Tensor, ...]:
        self._wait(self._pool.get_arrays, layer)
        return tuple(array[layer] for array in self._arrays)

    def _wait(self, get: Callable[[int], object], layer: int) -> None:
        if not self.failed:
            try:
                get(layer)
            except LoadFailed:
                self.failed = True


PassBuffers = DevicePool | UngatedOnceFailed
"""What a forward pass takes a pool's arrays from."""
