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
import torch

from hiradix.cache.agreement import Agree

logger = logging.getLogger(__name__)

NUM_SAMPLES = 256  # numbers of each tensor, evenly spread over its memory


class Weights:
    """Watches a model's parameters; None: none are there to be seen. Reads them at start and at each look.

    may_be_away: their memory may be given back while the engine sleeps, when reading it would end the
    process: then they are not read, and count as changed at each look. agree: with several ranks, the
    elementwise minimum over all of them, so that they say the same.
    """

    def __init__(self, model: Any, may_be_away: bool = False, agree: Agree | None = None) -> None:
        self._model = model
        self._may_be_away = may_be_away
        self._agree = agree
        self._first = self._last = self._digest()

    def changed(self) -> str | None:
        """None while they are on all ranks as at the last look; else what tells them from others, "" where
        they are as at the start again."""
        before, self._last = self._last, self._digest()
        is_same = np.array([self._last == other for other in (before, self._first)], np.int64)
        as_before, as_first = is_same if self._agree is None else self._agree(is_same)
        if as_before:
            return None
        return "" if as_first else self._last

    def _digest(self) -> str:
        if self._may_be_away:
            return uuid.uuid4().hex
        try:
            return _digest_of(self._model)
        except (RuntimeError, TypeError) as error:  # tensors that cannot be looked into
            logger.warning("weights cannot be read, and count as changed at each flush: %s", error)
            return uuid.uuid4().hex


def _digest_of(model: Any) -> str:
    if model is None:
        return ""
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
    """uint8 [bytes]: numbers spread over the memory of a tensor, without a copy of all of it."""
    if not weights.numel():
        return torch.empty(0, dtype=torch.uint8, device=weights.device)
    span = 1 + sum((size - 1) * stride for size, stride in zip(weights.shape, weights.stride(), strict=True))
    step = max(1, span // NUM_SAMPLES)
    count = min(NUM_SAMPLES, span)
    return weights.as_strided((count,), (step,)).contiguous().view(torch.uint8)


UNSEEN = Weights(None)
