"""Tells errors of a store that cannot be reached now from errors that these settings will always give."""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Iterator

from hiradix.errors import StorageError, Unreachable

_NUMBERS = frozenset(
    {
        errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.ENOTCONN, errno.EPIPE,
        errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN, errno.ENETRESET,
        errno.ETIMEDOUT, errno.ESHUTDOWN, errno.EADDRNOTAVAIL, errno.ESTALE, errno.EIO, errno.ENXIO,
        errno.ENODEV, errno.EREMOTEIO, errno.EAGAIN, errno.EBUSY, errno.ENOSPC, errno.EDQUOT,
    }
)  # fmt: skip
"""Of a network, of a file system that is not there or full, and of a lock that others hold."""
_TYPES = ("connect", "timeout", "timedout", "unavailable", "unreachable", "nameresolution")
"""In the names of libraries' own exceptions."""
_TEXTS = (
    "connection refused", "connection reset", "cannot connect", "could not connect", "failed to connect",
    "unable to connect", "connection failed", "failed connection", "timed out", "timeout", "unreachable",
    "no route to host", "name or service not known", "name resolution", "nodename nor servname",
    "service unavailable", "broken pipe", "host is down",
)  # fmt: skip
"""In what libraries say that have one exception for everything."""
_OF_VALUES = (ValueError, TypeError, LookupError, AttributeError, ImportError, AssertionError, SyntaxError)


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what it came from, the outermost first."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)


def is_unreachable(error: BaseException) -> bool:
    """Whether a constructor's error says that its store does not answer, rather than that a value is wrong.

    What cannot be told is taken for a wrong value: a start that ends is seen, a store that is never joined
    is not.
    """
    chain = list(causes(error))
    if any(isinstance(one, ssl.SSLCertVerificationError) for one in chain):
        return False
    return any(map(_says_so, chain))


def _says_so(error: BaseException) -> bool:
    if isinstance(error, Unreachable | StorageError | ConnectionError | TimeoutError | socket.gaierror):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _NUMBERS
    if isinstance(error, _OF_VALUES):
        return False
    names = "".join(one.__name__ for one in type(error).__mro__ if one.__module__ != "builtins").lower()
    text = str(error).lower()
    return any(word in names for word in _TYPES) or any(word in text for word in _TEXTS)
