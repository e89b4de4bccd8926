"""Servers that are forked from a process which has imported everything: real processes that start at once.

All have that process's hash seed, as no two servers of an operator have: a test of what a restart finds has
a `ServerProcess` among its lives.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from hiradix.apps.demo.process import Child, ServerProcess

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.e2e.warm_imports"])


def fork(target: Any, *arguments: Any) -> BaseProcess:
    """A child of the process with all imports, begun; `target` is run in it."""
    process = FORKS.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


class WarmServer(ServerProcess):
    """A ServerProcess whose interpreter has all imports behind it; its signals and its end are the same."""

    def _spawn(self) -> Child:
        begin = self.command.index("serve")
        return _Forked(fork(_serve, self.command[begin:], self.log))


class _Forked:
    """A forked process as a Child."""

    def __init__(self, process: BaseProcess):
        self._process = process

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a warm server", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _serve(arguments: Sequence[str], log: Path) -> None:
    """In the child."""
    from hiradix.cli import main

    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(main(list(arguments)))
