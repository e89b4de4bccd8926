"""Whether a model's weights are still those it was started with, told by all their bytes.

SGLang changes weights in place, from disk, tensors or other processes, and only has a cache reset. Buffers
count as weights: what ropes rotate by, scales of quantised weights.
"""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import Any

import numpy as np
import torch

from hiradix.cache.agreement import Agree

logger = logging.getLogger(__name__)

SUM_WORDS = 1 << 16  # of 32 bits, in one sum: 256 KiB of weights
PIECE_BYTES = 1 << 25  # of a tensor at once
_NUM_THREADS = 8
_NOBODY = 1 << 32  # more than any word of a digest


class Weights:
    """Watches a model's parameters and buffers; None: none are there to be seen. Reads them all at start and
    at each look.

    may_be_away: their memory may be given back while the engine sleeps, when reading it would end the
    process: then they are not read, and count as changed at each look. place: (rank, number of ranks).
    agree: with several ranks, the elementwise minimum over all of them; they look at the same time, and all
    say the same of all their parts together. computes_in: the model's type: buffers that are in no file are
    read as rounded to it, as SGLang rounds a rope's when the first request comes.
    """

    def __init__(
        self,
        model: Any,
        may_be_away: bool = False,
        place: tuple[int, int] = (0, 1),
        agree: Agree | None = None,
        computes_in: torch.dtype | None = None,
    ) -> None:
        self._model = model
        self._computes_in = computes_in
        self._may_be_away = may_be_away
        self._place = place
        self._agree = agree
        self._first = self._last = self._digest()
        self._is_unnamed = False

    @property
    def first(self) -> str:
        """A label of the weights at start, the same in all processes; "" where none were read."""
        return "" if self._model is None or self._may_be_away else self._first

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
        """This rank's digest; with several ranks, one digest of all of theirs. Each rank fills in its own row
        of a table, and the minimum over the ranks fills the table."""
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
            return _digest_of(self._model, self._computes_in)
        except (RuntimeError, TypeError) as error:  # tensors that cannot be looked into
            logger.warning("weights cannot be read, and count as changed at each flush: %s", error)
            return uuid.uuid4().hex


def _digest_of(model: Any, computes_in: torch.dtype | None = None) -> str:
    """32 hex digits of all bytes of a model's parameters and buffers, computed where they are.

    On a GPU sums of words come back, 8 bytes for 256 KiB; a CPU's memory is hashed, by 8 threads at most.
    """
    if model is None:
        return "0" * 32
    digest, tables, derived = hashlib.sha256(), _Tables(), _derived(model)
    sums: dict[torch.device, list[torch.Tensor]] = {}
    hashes: list[Future[bytes]] = []
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        for name, weights in chain(model.named_parameters(), model.named_buffers()):
            is_rounded = computes_in is not None and name in derived and weights.is_floating_point()
            for plain in _plain(weights.detach().to(computes_in) if is_rounded else weights.detach()):
                digest.update(f"{name} {plain.dtype} {tuple(plain.shape)} {plain.stride()}\n".encode())
                for piece in _pieces(plain):
                    if piece.device.type == "cpu":
                        hashes.append(threads.submit(_hashed, piece.numpy()))
                    else:
                        found = _sums(piece, tables.on(piece.device))
                        sums.setdefault(piece.device, []).append(found)
    for hashed in hashes:
        digest.update(hashed.result())
    for place in sorted(sums, key=str):
        digest.update(torch.cat(sums[place]).cpu().numpy().tobytes())
    return digest.hexdigest()[:32]


def _derived(model: Any) -> set[str]:
    """The buffers that are in no file, but computed of the config when the model is made."""
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }


def _hashed(piece: Any) -> bytes:
    return hashlib.sha256(piece).digest()


def _plain(weights: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors inside a tensor of a special class, as quantised ones are; of a plain one, itself."""
    flatten = getattr(weights, "__tensor_flatten__", None)
    if flatten is None:
        yield weights
        return
    for name in flatten()[0]:
        yield from _plain(getattr(weights, name))


class _Tables:
    """The factors of the words by their place: odd numbers that look random, the same in all processes.

    A word that was changed always changes the sum, as an odd number takes nothing from a difference; several
    that were changed cancel out by a chance of one in 2**32.
    """

    def __init__(self) -> None:
        numbers = np.frombuffer(hashlib.shake_256(b"hiradix-weights-1").digest(8 * SUM_WORDS), np.int64)
        self._first = torch.from_numpy(numbers | 1)
        self._on: dict[torch.device, torch.Tensor] = {}

    def on(self, device: torch.device) -> torch.Tensor:
        """int64 [SUM_WORDS] on a device."""
        if device not in self._on:
            self._on[device] = self._first.to(device)
        return self._on[device]


def _dense(weights: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor's memory as numbers without gaps, each [n]: a view, or copies of a part at once where it is a
    part of other rows. What a stride of nothing repeats is read once."""
    if not weights.numel():
        return
    axes = [(stride, size) for stride, size in zip(weights.stride(), weights.shape, strict=True) if size > 1]
    span = 1
    for stride, size in sorted(axis for axis in axes if axis[0]):
        if stride != span:
            num_rows = PIECE_BYTES // (weights[0].numel() * weights.element_size()) or 1
            yield from (part.contiguous().flatten() for part in torch.split(weights, num_rows))
            return
        span *= size
    yield weights.as_strided((span,), (1,))


def _pieces(weights: torch.Tensor) -> Iterator[torch.Tensor]:
    """uint8 [at most PIECE_BYTES] each: all bytes of a tensor."""
    for numbers in _dense(weights):
        yield from torch.split(numbers.view(torch.uint8), PIECE_BYTES)


def _sums(piece: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """int64 [n]: a sum of each `SUM_WORDS` words of 32 bits, each times its place's number, modulo 2**64."""
    if len(piece) % 4:
        piece = torch.nn.functional.pad(piece, (0, 4 - len(piece) % 4))
    if piece.storage_offset() % 4:
        piece = piece.clone()
    words, found = piece.view(torch.int32), []
    num_whole = len(words) // SUM_WORDS * SUM_WORDS
    if num_whole:
        found.append((words[:num_whole].view(-1, SUM_WORDS) * table).sum(1))
    if num_whole < len(words):
        rest = words[num_whole:]
        found.append((rest * table[: len(rest)]).sum(0, keepdim=True))
    return torch.cat(found)


UNSEEN = Weights(None)
