"""Whether a model's weights are still those it was started with, told by a sample of each.

SGLang changes weights in place, from disk, tensors or other processes, and only has a cache reset.
"""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hiradix.cache.agreement import Agree

logger = logging.getLogger(__name__)

NUM_SAMPLES = 256  # numbers of each tensor, one in each of as many equal parts of it
_GOLDEN = (5**0.5 - 1) / 2
_NOBODY = 1 << 32  # more than any word of a digest


class Weights:
    """Watches a model's parameters; None: none are there to be seen. Reads them at start and at each look.

    may_be_away: their memory may be given back while the engine sleeps, when reading it would end the
    process: then they are not read, and count as changed at each look. place: (rank, number of ranks).
    agree: with several ranks, the elementwise minimum over all of them; they look at the same time, and all
    say the same of all their parts together.
    """

    def __init__(
        self,
        model: Any,
        may_be_away: bool = False,
        place: tuple[int, int] = (0, 1),
        agree: Agree | None = None,
    ) -> None:
        self._model = model
        self._may_be_away = may_be_away
        self._place = place
        self._agree = agree
        self._first = self._last = self._digest()
        self._is_unnamed = False

    def changed(self) -> str | None:
        """None while they are on all ranks as at the last look; else what tells them from others, "" where
        they are as at the start again."""
        self._is_unnamed = False
        before, self._last = self._last, self._digest()
        if self._last == before:
            return None
        return "" if self._last == self._first else self._last

    def unnamed(self) -> str | None:
        """None while they are on all ranks as at the last look, or this was told since; else what tells
        nothing else, the same on all ranks, for what is of several weights, until `changed` is asked."""
        if self._is_unnamed or self._digest() == self._last:
            return None
        self._is_unnamed = True
        self._last = self._of_all(uuid.uuid4().hex)
        return self._last

    def _digest(self) -> str:
        return self._of_all(self._own_digest())

    def _of_all(self, own: str) -> str:
        """This rank's digest, or with several ranks one of all of theirs: each fills in its own, and the
        least are what somebody has filled in."""
        if self._agree is None:
            return own
        rank, size = self._place
        words = np.full((size, len(own) // 8), _NOBODY, np.int64)
        words[rank] = np.frombuffer(bytes.fromhex(own), ">u4")
        return hashlib.sha256(self._agree(words.ravel()).tobytes()).hexdigest()[:32]

    def _own_digest(self) -> str:
        if self._may_be_away:
            return uuid.uuid4().hex
        try:
            return _digest_of(self._model)
        except (RuntimeError, TypeError) as error:  # tensors that cannot be looked into
            logger.warning("weights cannot be read, and count as changed at each flush: %s", error)
            return uuid.uuid4().hex


def _digest_of(model: Any) -> str:
    if model is None:
        return "0" * 32
    found = [plain for _, weights in model.named_parameters() for plain in _plain(weights.detach())]
    samples = [_sample(weights) for weights in found]
    digest = hashlib.sha256()
    for place in sorted({sample.device for sample in samples}, key=str):
        own = [sample for sample in samples if sample.device == place]
        digest.update(torch.cat(own).cpu().numpy().tobytes())
    return digest.hexdigest()[:32]


def _plain(weights: torch.Tensor) -> Iterator[torch.Tensor]:
    """What a tensor of a class of its own is made of, as quantised ones are; a plain one is itself."""
    flatten = getattr(weights, "__tensor_flatten__", None)
    if flatten is None:
        yield weights
        return
    for name in flatten()[0]:
        yield from _plain(getattr(weights, name))


def _sample(weights: torch.Tensor) -> torch.Tensor:
    """uint8 [bytes]: numbers spread over a tensor, without a copy of all of it."""
    count = weights.numel()
    if not count:
        return torch.empty(0, dtype=torch.uint8, device=weights.device)
    at = np.unravel_index(_places(count), tuple(weights.shape) or (1,))
    offsets = sum(index * stride for index, stride in zip(at, weights.stride() or (1,), strict=True))
    span = 1 + sum((size - 1) * stride for size, stride in zip(weights.shape, weights.stride(), strict=True))
    memory = weights.as_strided((span,), (1,)).view(torch.uint8).view(span, weights.element_size())
    return memory[torch.from_numpy(offsets).to(weights.device)].flatten()


def _places(count: int) -> npt.NDArray[np.int64]:
    """int64 [at most NUM_SAMPLES], ascending: which of `count` numbers are read.

    Where in its part each lies goes round by the golden ratio, so that no width of a row meets one column.
    """
    if count <= NUM_SAMPLES:
        return np.arange(count)
    part = np.arange(NUM_SAMPLES)
    return ((part + (part * _GOLDEN) % 1) * (count / NUM_SAMPLES)).astype(np.int64)


UNSEEN = Weights(None)
