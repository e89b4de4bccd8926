"""Whether a model has still the weights it was started with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hiradix.adapters.sglang.weights import UNSEEN, Weights


class Model(torch.nn.Module):
    """Tensors of kinds that models have: transposed, of one number, of none, of bytes, large."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        given = {
            "plain": torch.randn(8, 4), "turned": torch.randn(6, 5).t(), "one": torch.randn(()),
            "none": torch.randn(0, 3), "fp8": torch.randn(4, 4).to(torch.float8_e4m3fn),
            "int": torch.randint(0, 9, (5,), dtype=torch.int8), "large": torch.randn(400, 300).bfloat16(),
        }  # fmt: skip
        for name, tensor in given.items():
            self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))


@pytest.mark.parametrize("name", ["plain", "turned", "one", "fp8", "int", "large"])
def test_other_weights_are_told_and_those_of_the_start_again(name: str) -> None:
    model = Model()
    weights = Weights(model)
    assert weights.changed() is None
    tensor = model.get_parameter(name)
    before = tensor.clone()
    tensor.data.copy_(before.float().mul(-2).add(1).to(tensor.dtype))
    label = weights.changed()
    assert label and weights.changed() is None
    tensor.data.copy_(before)
    assert weights.changed() == ""
    tensor.data.copy_(before.float().mul(-2).add(1).to(tensor.dtype))
    assert weights.changed() == label == changed(lambda other: other.get_parameter(name).data.copy_(tensor))


class Quantised(torch.Tensor):
    """A tensor of a class of its own, which has no numbers but those of its parts."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> Quantised:
        own: Quantised = torch.Tensor._make_wrapper_subclass(cls, data.shape)  # type: ignore[attr-defined]
        own.data_of, own.scale_of = data, scale
        return own

    data_of: torch.Tensor
    scale_of: torch.Tensor

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data_of", "scale_of"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].data_of, args[0].scale_of)
        raise NotImplementedError(str(func))


def test_weights_of_a_class_of_their_own_are_told_by_their_parts() -> None:
    scale = torch.ones(4)
    model = torch.nn.Module()
    quantised = Quantised(torch.zeros(4, 4, dtype=torch.int8), scale)
    model.register_parameter("w", torch.nn.Parameter(quantised, requires_grad=False))
    weights = Weights(model)
    assert weights.changed() is None
    scale.mul_(2.0)
    assert weights.changed()


def test_weights_that_cannot_be_looked_into_count_as_changed(caplog: pytest.LogCaptureFixture) -> None:
    with torch.device("meta"):
        model = Model()
    weights = Weights(model)
    assert weights.changed() and len(caplog.records) == 2


def changed(how: Callable[[Model], object]) -> str | None:
    """What another process says of the same change."""
    model = Model()
    weights = Weights(model)
    how(model)
    return weights.changed()


def test_ranks_say_that_there_was_a_change_when_one_has_seen_it() -> None:
    other = np.ones(2, np.int64)  # what the other rank says
    weights = Weights(Model(), agree=lambda own: np.minimum(own, other))
    assert weights.changed() is None
    other[:] = [0, 0]
    assert weights.changed()
    other[:] = [1, 0]
    assert weights.changed() is None
    other[:] = [0, 1]
    assert weights.changed() == ""


def test_weights_that_may_be_away_are_not_read() -> None:
    class Away:
        def named_parameters(self) -> object:
            raise AssertionError("their memory is not there")

    weights = Weights(Away(), may_be_away=True)
    labels = [weights.changed() for _ in range(3)]
    assert all(labels) and len(set(labels)) == 3


def test_weights_that_nobody_sees_never_change() -> None:
    assert UNSEEN.changed() is None
