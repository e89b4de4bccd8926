"""Folders that cannot be written: a real read-only mount, or every write of this process refused."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

MOUNT = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
_CHANGES = ("mkdir", "unlink", "rename", "replace", "utime", "truncate", "ftruncate", "pwrite", "pwritev")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def in_read_only_mount(folder: Path, module: str, *arguments: str) -> str:
    """What `python -m module` prints where `folder` is a read-only mount. Skips where that is not allowed."""
    command = ["unshare", "-m", "sh", "-c", MOUNT, str(folder)]
    try:
        allowed = subprocess.run([*command, "true"], capture_output=True, timeout=60).returncode == 0
    except FileNotFoundError:
        allowed = False
    if not allowed:
        pytest.skip("no read-only mount can be made here (unshare -m, mount --bind)")
    whole = [*command, sys.executable, "-m", module, str(folder), *arguments]
    done = subprocess.run(whole, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def read_only(folder: Path) -> Iterator[list[str]]:
    """The file system of `folder` takes no writes, those of files that are open included; gives what was
    tried. As the kernel does it for calls of the module `os`."""
    tried: list[str] = []
    real_open, reals = os.open, {name: getattr(os, name) for name in _CHANGES}

    def refused(what: str) -> OSError:
        tried.append(what)
        return OSError(errno.EROFS, os.strerror(errno.EROFS))

    def is_inside(path: Any) -> bool:
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        return Path(path).is_relative_to(folder)

    def open_to_read(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & _WRITES and is_inside(path):
            raise refused(f"open {path}")
        return real_open(path, flags, *rest, **more)

    def change(name: str) -> Callable[..., Any]:
        def changed(path: Any, *rest: Any, **more: Any) -> Any:
            if is_inside(path):
                raise refused(f"{name} {path}")
            return reals[name](path, *rest, **more)

        return changed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", open_to_read)
        for name in _CHANGES:
            patch.setattr(os, name, change(name))
        yield tried


def looks(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Everything below a folder: kind and rights, length, time of change (ns)."""
    found = [folder, *folder.rglob("*")]
    status = {str(path): path.lstat() for path in found}
    return {name: (one.st_mode, one.st_size, one.st_mtime_ns) for name, one in status.items()}
