"""Whether a model has still the weights it was started with."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hiradix.adapters.sglang import weights as weights_module
from hiradix.adapters.sglang.weights import UNSEEN, Weights, _pieces, _sums, _Tables


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


def summed(weights: torch.Tensor) -> list[int]:
    """What comes back from a GPU of a tensor's memory."""
    table = _Tables().on(weights.device)
    return [int(number) for piece in _pieces(weights) for number in _sums(piece, table)]


def hashed(weights: torch.Tensor) -> list[bytes]:
    return [bytes(piece.numpy()) for piece in _pieces(weights)]


SHAPES = [(64, 64), (512, 256), (300,), (257, 3), (7, 4096), (1 << 16, 2), (3, 5, 7)]


@pytest.mark.parametrize("read", [summed, hashed])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.float32, torch.int64])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_changed_row_is_seen_whichever_it_is(
    read: Callable[[torch.Tensor], list[Any]], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """One number of a row, the row's sign, and two rows in each other's places."""
    torch.manual_seed(0)
    old = torch.randint(1, 100, shape).to(dtype)
    before = read(old)
    for row in {0, 1, shape[0] // 2, shape[0] - 1}:
        for change in (lambda part: part.flatten()[-1:].add_(1), torch.Tensor.neg_):
            new = old.clone()
            change(new[row : row + 1])
            assert read(new) != before and read(new) == read(new.clone())
    if old[0].ne(old[-1]).any():
        new = old.clone()
        new[0], new[-1] = old[-1], old[0]
        assert read(new) != before


def test_signs_that_are_turned_in_pairs_do_not_cancel_out() -> None:
    """The topmost bit of a word is all that differs: times any odd number it is the same modulo 2**64."""
    old = torch.zeros(1 << 12, dtype=torch.float32)
    for first, second in ((0, 1), (7, 4000), (2, 3)):
        new = old.clone()
        new[[first, second]] = -0.0
        assert summed(new) != summed(old)


@pytest.mark.parametrize("read", [summed, hashed])
def test_what_is_read_is_all_of_the_tensor_and_nothing_else(
    read: Callable[[torch.Tensor], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor may be a part of another's memory, turned, or repeat a number."""
    monkeypatch.setattr(weights_module, "PIECE_BYTES", 1 << 12)
    memory = torch.arange(40_000, dtype=torch.int32).view(200, 200)
    parts: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda all: all[:, 3:150], lambda all: all.t()[5:], lambda all: all[7:], lambda all: all[3, 4],
        lambda all: all[::3, ::7], lambda all: all.view(100, 2, 200).transpose(0, 1),
        lambda all: all[0, :1].expand(10_000), lambda all: all.view(torch.int16)[:, 1:],
    ]  # fmt: skip
    for part in parts:
        before, inside = read(part(memory)), torch.zeros_like(memory)
        part(inside).fill_(-1)
        other = memory.clone()
        other[inside == 0] = -5
        assert read(part(other)) == before
        spots = inside.nonzero()
        for spot in (spots[0], spots[len(spots) // 2], spots[-1]):
            other = memory.clone()
            other[tuple(spot)] += 1 << 16
            assert read(part(other)) != before


@pytest.mark.parametrize("is_kept", [True, False])
def test_buffers_count_as_well(is_kept: bool) -> None:
    """What ropes rotate by is no parameter, and in no file."""
    model = Model()
    model.register_buffer("cos_sin_cache", torch.randn(4096, 16), persistent=is_kept)
    weights = Weights(model)
    assert weights.changed() is None
    model.get_buffer("cos_sin_cache")[4095, 3] += 0.5
    assert weights.changed()


def test_a_rope_that_is_rounded_to_the_models_type_is_the_same() -> None:
    """SGLang does so when the first request comes; other angles are another rope in any type."""
    model = Model()
    model.register_buffer("cos_sin_cache", torch.randn(64, 16), persistent=False)
    model.register_buffer("scale", torch.randn(64), persistent=True)
    for dtype in (torch.bfloat16, torch.float16):
        weights = Weights(model, computes_in=dtype)
        rope, scale = model.get_buffer("cos_sin_cache"), model.get_buffer("scale")
        model.cos_sin_cache = rope.to(dtype)
        assert weights.changed() is None
        model.cos_sin_cache[3, 3] += 0.5
        assert weights.changed()
        model.cos_sin_cache = rope
        assert weights.changed() == ""
        model.scale = scale.to(dtype)
        assert weights.changed()
        model.scale = scale


def test_tensors_in_each_others_places_are_other_weights() -> None:
    def label(first: str, second: str) -> str:
        model = torch.nn.Module()
        for name, value in ((first, 1.0), (second, 2.0)):
            model.register_parameter(name, torch.nn.Parameter(torch.full((4,), value)))
        return Weights(model).first

    assert label("a", "b") == label("a", "b") != label("b", "a")


def test_the_weights_of_the_start_have_a_name_for_other_processes() -> None:
    assert Weights(Model()).first == Weights(Model()).first
    assert UNSEEN.first == Weights(Model(), may_be_away=True).first == ""


class Meeting:
    """The elementwise minimum over ranks that are threads."""

    def __init__(self, size: int) -> None:
        self._given: list[Any] = [None] * size
        self._all_there = threading.Barrier(size)

    def of(self, rank: int) -> Callable[[Any], Any]:
        def least(vector: Any) -> Any:
            self._given[rank] = vector
            self._all_there.wait(30)
            found = np.min(self._given, axis=0)
            self._all_there.wait(30)
            return found

        return least


def labels_of(looks: list[list[float]]) -> list[list[str | None]]:
    """By rank, what each says at each look, `looks` having a number for each rank's weights; at start: 0."""
    size = len(looks[0])
    meeting, told = Meeting(size), [list[str | None]() for _ in range(size)]

    models = [Model() for _ in range(size)]
    first = copy.deepcopy(models[0].state_dict())

    def run(rank: int) -> None:
        model = models[rank]
        weights = Weights(model, place=(rank, size), agree=meeting.of(rank))
        for look in looks:
            model.load_state_dict(first)
            if look[rank]:
                model.get_parameter("plain").data.fill_(look[rank])
            told[rank].append(weights.changed())

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return told


def test_ranks_have_one_label_which_tells_every_part_of_the_weights() -> None:
    """Each rank named what it stored by its own part: where they share pages, nothing was found."""
    told = labels_of([[0, 0], [1, 0], [1, 0], [2, 0], [2, 3], [0, 3], [0, 0], [1, 0], [0, 1]])
    assert told[0] == told[1]
    first, same, other, both, half, back, again, swapped = told[0][1:]
    assert (told[0][0], same, back) == (None, None, "") and again == first
    assert len({first, other, both, half, swapped}) == 5 and all([first, other, both, half, swapped])


def test_ranks_whose_weights_may_be_away_have_one_label_too() -> None:
    meeting, model = Meeting(2), Model()
    told: dict[int, list[str | None]] = {}

    def run(rank: int) -> None:
        weights = Weights(model, True, (rank, 2), meeting.of(rank))
        told[rank] = [weights.changed() for _ in range(3)]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert told[0] == told[1] and len(set(told[0])) == 3 and all(told[0])


def test_weights_that_may_be_away_are_not_read() -> None:
    class Away:
        def named_parameters(self) -> object:
            raise AssertionError("their memory is not there")

    weights = Weights(Away(), may_be_away=True)
    labels = [weights.changed() for _ in range(3)]
    assert all(labels) and len(set(labels)) == 3


def test_weights_that_nobody_sees_never_change() -> None:
    assert UNSEEN.changed() is None
