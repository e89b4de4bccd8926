"""Programs forked from a process that has imported what they need: real processes that start at once.

All have that process's hash seed, as no two starts of an operator have, and what they would spawn is forked,
with nothing pickled: a test of what a restart finds, or of such children, has a `subprocess` among its lives.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import multiprocessing.process
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from typing import Any

FORKS = multiprocessing.get_context("forkserver")


def fork(target: Any, *arguments: Any) -> BaseProcess:
    """A child of the process with all imports, begun; `target` is run in it.

    What is imported is what `FORKS.set_forkserver_preload` was told before the first fork.
    """
    process = FORKS.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


class Forked:
    """A forked process, with what is used of subprocess.Popen."""

    def __init__(self, process: BaseProcess):
        self._process = process

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def program(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    stdout: int,
    stderr: int,
    stdin: int | None = None,
) -> Forked:
    """`python -m module arguments` in a session of its own; without stdin that is empty."""
    files = {number: File(file) for number, file in enumerate((stdin, stdout, stderr)) if file is not None}
    return Forked(fork(_run, module, list(arguments), dict(environment), files))


class File:
    """A file descriptor that a child is given one of its own for."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return _duplicated, (DupFd(self.descriptor),)


def _duplicated(duplicate: Any) -> File:
    return File(duplicate.detach())


def _run(module: str, arguments: list[str], environment: dict[str, str], files: dict[int, File]) -> None:
    """In the child: be that program."""
    os.setsid()
    for number, file in files.items():
        os.dup2(file.descriptor, number)
        os.close(file.descriptor)
    os.environ.clear()
    os.environ.update(environment)
    _be_a_program()
    gc.freeze()
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # in place of the fork server's
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # a forked process would end without them


def _be_a_program() -> None:
    """For `multiprocessing` this is a program's first process; what it spawns is forked."""
    contexts = multiprocessing.context._concrete_contexts  # type: ignore[attr-defined]
    contexts["spawn"] = contexts["fork"]
    multiprocessing.set_start_method(None, force=True)  # type: ignore[arg-type]
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
