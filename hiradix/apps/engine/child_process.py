"""A program in a process of its own, which ends where a request takes it too long or too much memory."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hiradix.errors import Misuse

_PATIENCE_S = 50.0  # by the clock: the process ends itself before, unless it is stopped
_PIPE_BYTES = 1 << 16
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH", "TZ", "LANG", "LC_ALL", "LC_TIME")
"""The part of the server's environment that the process has: keys and passwords may be in the rest."""


class ChildError(Exception):
    """The process cannot be started, has ended, or ran for too long. Its text says which."""


class LimitedChild:
    """Thread-safe: answers one request after the other.

    script: of this folder, run by its path: it reads lines of JSON, `given` and then one for each request,
    writes one for each request, and ends by SIGPROF after `seconds` of the processor for one. The process is
    started with the first request, and again after one that ended it.
    """

    def __init__(self, script: str, given: Mapping[str, Any], seconds: float) -> None:
        self._script = script
        self._seconds = seconds
        self._given = json.dumps(given, default=str).encode("ascii") + b"\n"
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., LimitedChild] | None = None  # of that process
        self._lock = threading.Lock()

    def ask(self, line: str) -> Any:
        """The answer to a line of JSON in ASCII. Raises ChildError."""
        with self._lock:
            return json.loads(self._answer(line.encode("ascii") + b"\n"))

    def close(self) -> None:
        """End the process. Another request starts another."""
        with self._lock:
            self._ended()

    def _answer(self, line: bytes) -> bytes:
        if self._process is not None and self._process.poll() is not None:
            self._ended()
        is_new = self._process is None
        if is_new:
            self._begin()
            line = self._given + line
        answer, code = self._asked(line)
        if answer is None:
            patience_s = self._seconds + _PATIENCE_S
            raise ChildError(f"ran for too long: no answer within {patience_s:g} s by the clock")
        if code == -signal.SIGPROF:
            raise ChildError(f"ran for too long: not done within {self._seconds:g} s")
        if code is None:
            return answer
        if is_new:
            raise ChildError(f"ended its process with exit code {code}")
        return self._answer(line)  # it may have ended before

    def _asked(self, line: bytes) -> tuple[bytes | None, int | None]:
        """The answer of the process, None after too long; and the exit code of a process that gave no whole
        answer."""
        if self._process is None:
            raise Misuse("there is a process")
        answer: bytes | None = None
        try:
            answer = _exchanged(self._process, line, time.monotonic() + self._seconds + _PATIENCE_S)
        finally:
            is_whole = answer is not None and answer.endswith(b"\n")
            code = None if is_whole else self._ended()  # or the next would be given this one's text
        return answer, code

    def _begin(self) -> None:
        try:
            self._process = self._start()
        except OSError as error:
            raise ChildError(f"cannot be run: {error}") from error
        self._end = weakref.finalize(self, _end, self._process)

    def _ended(self) -> int | None:
        """End the process; its exit code."""
        code: int | None = self._end() if self._end is not None else None
        self._process = self._end = None
        return code

    def _start(self) -> subprocess.Popen[bytes]:
        child = Path(__file__).with_name(self._script)
        process = subprocess.Popen(
            [sys.executable, "-P", str(child)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, process_group=0,
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        )  # fmt: skip
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                os.set_blocking(stream.fileno(), False)
        return process


def _exchanged(process: subprocess.Popen[bytes], line: bytes, until: float) -> bytes | None:
    """Send a line to the process and read its answer: without a line's end if the process has ended, None if
    `until` has passed."""
    stdin, stdout = process.stdin, process.stdout
    if stdin is None or stdout is None:
        raise Misuse("the process has pipes")
    left, answer = memoryview(line), bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(stdin, selectors.EVENT_WRITE)
        selector.register(stdout, selectors.EVENT_READ)
        while (patience := until - time.monotonic()) > 0:
            for key, _ in selector.select(patience):
                if key.fileobj is stdin:
                    try:
                        left = left[os.write(stdin.fileno(), left[:_PIPE_BYTES]) :]
                    except BrokenPipeError:
                        left = left[:0]
                    if not left:
                        selector.unregister(stdin)
                else:
                    part = os.read(stdout.fileno(), _PIPE_BYTES)
                    answer += part
                    if not part or part.endswith(b"\n"):
                        return bytes(answer)
    return None


def _end(process: subprocess.Popen[bytes]) -> int:
    """End the process, killing it if it still runs; its exit code."""
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    try:
        return process.wait(0.1)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
