"""Folders that can be read and not written: a read-only mount, or a folder of another user's.

Their pages are served, and nothing is changed there: no page, no order of use, no lock.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM)
"""Errors of a write by which a folder is read-only; of a write that worked before only the first is."""
_WRITE = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


def refusal(folder: Path, names: Sequence[str] = ()) -> OSError | None:
    """The error why no file can be made in a folder that exists, or why one of `names` in it cannot be
    written; None if they can, or if the disk is only full."""
    path = folder / f"probe-{os.getpid()}-{os.urandom(4).hex()}"
    try:
        os.close(os.open(path, _CREATE, 0o600))
    except OSError as error:
        return error if error.errno in REFUSED and os.path.isdir(folder) else None
    path.unlink(missing_ok=True)
    for name in names:
        try:
            os.close(os.open(folder / name, _WRITE))
        except OSError as error:
            if error.errno in REFUSED:
                return error
    return None


def said_of(folder: Path, why: OSError) -> str:
    """The log message about such a folder."""
    reason = os.strerror(why.errno or errno.EROFS)
    return f"{folder} cannot be written ({reason}): its pages are served, and none are stored"
