"""System calls that Python does not have, or has only with a detour.

`_quick` calls keep the interpreter lock: they take about a microsecond, and giving the lock away to a thread
that computes costs up to its whole switch interval (5 ms). `_slow` calls let go of it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys

if sys.platform != "linux":
    raise ImportError("the disk backend needs Linux; use file")

_slow = ctypes.CDLL(None, use_errno=True)
_quick = ctypes.PyDLL(None, use_errno=True)
_slow.syscall.restype = _quick.syscall.restype = ctypes.c_long
_quick.lseek.restype = ctypes.c_longlong
_quick.lseek.argtypes = (ctypes.c_int, ctypes.c_longlong, ctypes.c_int)

# Numbers of the table that all architectures share from 424 on.
_IO_URING_SETUP, _IO_URING_ENTER, _CACHESTAT = 425, 426, 451
_KEEP_SIZE, _ZERO_RANGE = 0x01, 0x10  # of fallocate
_ZEROS_BYTES = 1 << 20
_OS_PAGE = os.sysconf("SC_PAGE_SIZE")

_counts = ctypes.c_uint64 * 5
_range = ctypes.c_uint64 * 2


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def file_size(fd: int) -> int:
    """Length of an open file, about 1 us. The file's offset is moved. Raises OSError."""
    size = _quick.lseek(fd, 0, os.SEEK_END)
    if size < 0:
        raise _error()
    return int(size)


def clear_range(fd: int, offset: int, num_bytes: int) -> None:
    """Have a range of a file read as zeros, whatever was there; its blocks stay the file's. What reads as zeros
    without having been written costs nothing. Raises OSError."""
    try:
        if os.lseek(fd, offset, os.SEEK_DATA) >= offset + num_bytes:
            return
    except OSError as error:
        if error.errno == errno.ENXIO:  # no data from there on
            return
    whole = ctypes.c_int64(offset), ctypes.c_int64(num_bytes)
    if _slow.fallocate(ctypes.c_int(fd), ctypes.c_int(_ZERO_RANGE | _KEEP_SIZE), *whole) == 0:
        return
    zeros = bytes(min(num_bytes, _ZEROS_BYTES))
    for at in range(offset, offset + num_bytes, len(zeros)):
        os.pwrite(fd, zeros[: offset + num_bytes - at], at)


def has_cachestat(fd: int) -> bool:
    """Whether the kernel tells what of `fd` is in the page cache (6.5 and newer, unless forbidden)."""
    return _cachestat(fd, 0, _OS_PAGE) is not None


def cached_share(fd: int, offset: int, num_bytes: int) -> float:
    """The share of a range that is in the page cache now, 0 to 1."""
    num_pages = (offset + num_bytes - 1) // _OS_PAGE - offset // _OS_PAGE + 1
    return (_cachestat(fd, offset, num_bytes) or 0) / num_pages


def _cachestat(fd: int, offset: int, num_bytes: int) -> int | None:
    wanted, found = _range(offset, num_bytes), _counts()
    done = _quick.syscall(
        ctypes.c_long(_CACHESTAT),
        ctypes.c_uint(fd),
        ctypes.byref(wanted),
        ctypes.byref(found),
        ctypes.c_uint(0),
    )
    return int(found[0]) if done == 0 else None


def io_uring_setup(num_entries: int, parameters: ctypes.Structure) -> int:
    """A descriptor. Raises OSError: EPERM or ENOSYS where io_uring is not allowed."""
    fd = _slow.syscall(ctypes.c_long(_IO_URING_SETUP), ctypes.c_uint(num_entries), ctypes.byref(parameters))
    if fd < 0:
        raise _error()
    return int(fd)


def io_uring_enter(fd: int, num_submit: int, num_wait: int) -> int:
    """Submit entries and wait for `num_wait` completions; the number of entries that were taken. Raises
    OSError."""
    taken = _slow.syscall(
        ctypes.c_long(_IO_URING_ENTER),
        ctypes.c_int(fd),
        ctypes.c_uint(num_submit),
        ctypes.c_uint(num_wait),
        ctypes.c_uint(1),  # IORING_ENTER_GETEVENTS
        None,
        ctypes.c_size_t(0),
    )
    if taken < 0:
        raise _error()
    return int(taken)
