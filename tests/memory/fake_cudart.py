"""A libcudart of ctypes callbacks with the types of CUDA's headers: what it is given has crossed a C call.

Copies are done at once. Like the real one it keeps the last error until it is asked for it, and refuses a
copy that begins in one registration of host memory and ends outside of it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import CFUNCTYPE, POINTER, c_int, c_size_t, c_uint, c_void_p
from typing import Any

import pytest
import torch

from hiradix.memory import HostPool, host_memory, pools
from hiradix.memory.cuda_runtime import CudaRuntime

INVALID_VALUE, OUT_OF_MEMORY, NEWER_DRIVER = 1, 2, 36


class MemLocation(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class MemcpyAttributes(ctypes.Structure):
    _fields_ = [
        ("srcAccessOrder", c_int),
        ("srcLocHint", MemLocation),
        ("dstLocHint", MemLocation),
        ("flags", c_uint),
    ]


LISTS = (POINTER(c_void_p), POINTER(c_void_p), POINTER(c_size_t), c_size_t)
ATTRIBUTES = (POINTER(MemcpyAttributes), POINTER(c_size_t), c_size_t)


class FakeCudart:
    """calls: ("each" or "batch", stream) of every copy. max_register: bytes of one registration at most.
    refuse_batches: a code, as a driver gives that has no batches. device: what `pinned_pool` made current;
    registered_on: what was at each registration."""

    def __init__(self, runtime: int = 12080, driver: int = 13000) -> None:
        self.calls: list[tuple[str, int | None]] = []
        self.pieces: list[tuple[int, int, int]] = []
        self.registered: dict[int, int] = {}
        self.device: object = None
        self.registered_on: list[object] = []
        self.max_register = 1 << 62
        self.refuse_batches = self.last_error = 0
        self._callbacks: list[Any] = []
        version, each = (POINTER(c_int),), (c_void_p, c_void_p, c_size_t, c_int, c_void_p)
        self.cudaGetLastError = self._export((), self._take_error)
        self.cudaRuntimeGetVersion = self._export(version, lambda into: self._give(into, runtime))
        self.cudaDriverGetVersion = self._export(version, lambda into: self._give(into, driver))
        self.cudaDeviceGetAttribute = self._export((*version, c_int, c_int), self._attribute)
        self.cudaHostRegister = self._export((c_void_p, c_size_t, c_uint), self._register)
        self.cudaHostUnregister = self._export((c_void_p,), self._unregister)
        self.cudaMemcpyAsync = self._export(each, self._each)
        batch = (*LISTS, *ATTRIBUTES)
        if runtime >= 13000:
            self.cudaMemcpyBatchAsync = self._export((*batch, c_void_p), self._batch)
        elif runtime >= 12080:
            with_fail_index = (*batch, POINTER(c_size_t), c_void_p)
            self.cudaMemcpyBatchAsync = self._export(
                with_fail_index, lambda *given: self._batch(*given[:7], given[8])
            )

    def _export(self, arguments: Sequence[Any], call: Callable[..., int]) -> Any:
        """The call as ctypes finds it in a library: an address, of whose arguments nothing is known."""
        callback = CFUNCTYPE(c_int, *arguments)(call)
        self._callbacks.append(callback)
        return CFUNCTYPE(c_int)(ctypes.cast(callback, c_void_p).value)

    def _take_error(self) -> int:
        code, self.last_error = self.last_error, 0
        return code

    def _failed(self, code: int) -> int:
        self.last_error = code or self.last_error
        return code

    def _give(self, into: Any, value: int) -> int:
        into[0] = value
        return 0

    def _attribute(self, into: Any, attribute: int, device: int) -> int:
        into[0] = int(attribute == 91 and device == 3)
        return 0

    def _register(self, address: int, num_bytes: int, flags: int) -> int:
        if num_bytes > self.max_register or flags:
            return self._failed(OUT_OF_MEMORY)
        self.registered[address] = num_bytes
        self.registered_on.append(self.device)
        return 0

    def _unregister(self, address: int) -> int:
        return 0 if self.registered.pop(address, None) else self._failed(INVALID_VALUE)

    def _each(self, dst: int, src: int, num_bytes: int, kind: int, stream: int | None) -> int:
        if kind != 4 or not (self._is_whole(dst, num_bytes) and self._is_whole(src, num_bytes)):
            return self._failed(INVALID_VALUE)
        self.calls.append(("each", stream))
        self._move(dst, src, num_bytes)
        return 0

    def _batch(self, dst: Any, src: Any, sizes: Any, count: int, *rest: Any) -> int:
        attributes, first, num_attributes, stream = rest
        if self.refuse_batches:
            return self._failed(self.refuse_batches)
        pieces = [(dst[at], src[at], sizes[at]) for at in range(count)]
        told = (attributes[0].srcAccessOrder, attributes[0].flags, first[0], num_attributes)
        whole = all(self._is_whole(side, piece[2]) for piece in pieces for side in piece[:2])
        if told != (1, 0, 0, 1) or not stream or not whole:
            return self._failed(INVALID_VALUE)
        self.calls.append(("batch", stream))
        for piece in pieces:
            self._move(*piece)
        return 0

    def _is_whole(self, address: int, num_bytes: int) -> bool:
        """Whether the bytes are in one registration, or in none at all."""
        end = address + num_bytes
        touched = [(a, a + n) for a, n in self.registered.items() if a < end and address < a + n]
        return all(begin <= address and end <= last for begin, last in touched)

    def _move(self, dst: int, src: int, num_bytes: int) -> None:
        self.pieces.append((dst, src, num_bytes))
        ctypes.memmove(dst, src, num_bytes)


class Stream:
    def __init__(self, cuda_stream: int) -> None:
        self.cuda_stream = cuda_stream


def on_stream(monkeypatch: pytest.MonkeyPatch, stream: int) -> None:
    """torch's current stream has this handle."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream(stream))


def pinned_pool(
    monkeypatch: pytest.MonkeyPatch, library: FakeCudart, chunk: int, *arguments: Any, **options: Any
) -> HostPool:
    """A HostPool for a CUDA device, registered with `library` in chunks of about `chunk` bytes."""

    @contextmanager
    def device(index: object) -> Iterator[None]:
        library.device = index
        yield
        library.device = None

    runtime = CudaRuntime(library)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(pools, "node_of", lambda near: None)
    monkeypatch.setattr(host_memory, "find_runtime", lambda: runtime)
    monkeypatch.setattr(host_memory, "_REGISTER_CHUNK", chunk)
    monkeypatch.setattr(host_memory, "_MIN_REGISTER_CHUNK", 1)
    return HostPool(*arguments, device="cuda:3", **options)
