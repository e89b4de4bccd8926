"""The CUDA runtime library that torch has loaded, called through ctypes with the types of its header."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

logger = logging.getLogger(__name__)

Addresses = npt.NDArray[np.int64]

NEEDS_NEWER_DRIVER = frozenset({36, 500, 801})  # CallRequiresNewerDriver, SymbolNotFound, NotSupported
HOST_POINTER_ATTRIBUTE = 91  # cudaDevAttrCanUseHostPointerForRegisteredMem
_BATCH_SINCE = 12080  # 12.8
_NO_FAIL_INDEX_SINCE = 13000
_ORDER_STREAM = 1  # cudaMemcpySrcAccessOrderStream: sources are read in stream order
_COPY_DEFAULT = 4  # cudaMemcpyDefault: the direction follows from the addresses

_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_ARGUMENTS: dict[str, Sequence[Any]] = {
    "cudaGetLastError": (),
    "cudaRuntimeGetVersion": (_POINTER,),
    "cudaDriverGetVersion": (_POINTER,),
    "cudaDeviceGetAttribute": (_POINTER, _INT, _INT),
    "cudaHostRegister": (_POINTER, _SIZE, ctypes.c_uint),
    "cudaHostUnregister": (_POINTER,),
    "cudaMemcpyAsync": (_POINTER, _POINTER, _SIZE, _INT, _POINTER),
}
_BATCH_ARGUMENTS = (_POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _SIZE)


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Attributes(ctypes.Structure):
    """cudaMemcpyAttributes."""

    _fields_ = [
        ("order", ctypes.c_int),
        ("src", _Location),
        ("dst", _Location),
        ("flags", ctypes.c_uint),
    ]


class CudaRuntime:
    """Calls of the runtime, for the calling thread's current device. Each returns CUDA's code, 0 for success.

    A code that was returned is forgotten by CUDA: it would else be found by the thread's next kernel launch,
    which torch checks and which had no part in it.

    library: libcudart as ctypes has it. has_batches: whether library and driver have cudaMemcpyBatchAsync.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        for name, arguments in _ARGUMENTS.items():
            getattr(library, name).argtypes = arguments
        version, driver = self._version("cudaRuntimeGetVersion"), self._version("cudaDriverGetVersion")
        self.has_batches = min(version, driver) >= _BATCH_SINCE and hasattr(library, "cudaMemcpyBatchAsync")
        self._takes_fail_index = version < _NO_FAIL_INDEX_SINCE
        if self.has_batches:
            more = (_POINTER, _POINTER) if self._takes_fail_index else (_POINTER,)
            library.cudaMemcpyBatchAsync.argtypes = (*_BATCH_ARGUMENTS, *more)

    def reads_host_addresses(self, device: int) -> bool:
        """Whether kernels on the device may use the host's own address of registered memory."""
        value = ctypes.c_int(0)
        code = self._library.cudaDeviceGetAttribute(ctypes.byref(value), HOST_POINTER_ATTRIBUTE, device)
        return self._cleared(code) == 0 and value.value == 1

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        return self._cleared(self._library.cudaHostRegister(address, num_bytes, flags))

    def cudaHostUnregister(self, address: int) -> int:
        return self._cleared(self._library.cudaHostUnregister(address))

    def copy(self, dst: int, src: int, num_bytes: int, stream: int) -> int:
        """cudaMemcpyAsync."""
        return self._cleared(self._library.cudaMemcpyAsync(dst, src, num_bytes, _COPY_DEFAULT, stream))

    def copy_batch(self, dst: Addresses, src: Addresses, sizes: Addresses, stream: int) -> int:
        """cudaMemcpyBatchAsync; the arrays are read before it returns. Takes no legacy default stream (0)."""
        arrays = [np.ascontiguousarray(part, np.int64) for part in (dst, src, sizes)]
        attributes, first = _Attributes(order=_ORDER_STREAM), ctypes.c_size_t(0)
        fail = [ctypes.byref(ctypes.c_size_t(0))] if self._takes_fail_index else []
        code = self._library.cudaMemcpyBatchAsync(
            *(part.ctypes.data for part in arrays),
            len(arrays[0]),
            ctypes.byref(attributes),
            ctypes.byref(first),
            1,
            *fail,
            stream,
        )
        return self._cleared(code)

    def _cleared(self, code: int) -> int:
        if code:
            self._library.cudaGetLastError()
        return code

    def _version(self, call: str) -> int:
        """The version as a number, such as 12080 for 12.8; 0 if the call fails."""
        value = ctypes.c_int(0)
        return value.value if self._cleared(getattr(self._library, call)(ctypes.byref(value))) == 0 else 0


@cache
def find_runtime() -> CudaRuntime | None:
    """The runtime that torch uses; None where torch has none, or has it inside of itself."""
    if torch.version.cuda is None:
        return None
    try:
        return CudaRuntime(ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}"))
    except (OSError, AttributeError) as error:
        logger.warning("no CUDA runtime library for the copy engines: %s", error)
        return None
