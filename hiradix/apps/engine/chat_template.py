"""A model's chat template: a program by whoever made the model, run in a process of its own."""

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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hiradix.errors import Misuse

SECONDS = 5.0  # of the processor, for one conversation, which takes a millisecond
MEMORY_BYTES = 1 << 30  # of addresses, in all
MOST_CHARS = 1 << 24  # of one conversation's text
_PATIENCE_S = 50.0  # by the clock: the process ends itself before, unless it is stopped
_PIPE_BYTES = 1 << 16
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH", "TZ", "LANG", "LC_ALL", "LC_TIME")
"""What the process has of the server's environment, where keys and passwords may be."""


class TemplateError(Exception):
    """A template that fails on these messages, or runs for too long. Its text says which."""


class ChatTemplate:
    """Thread-safe: renders one conversation after the other.

    variables: what it can name beside the messages, as JSON has it. The process is started with the first
    conversation, and again after one that ended it.
    """

    def __init__(
        self,
        template: str,
        variables: Mapping[str, Any],
        seconds: float = SECONDS,
        memory_bytes: int = MEMORY_BYTES,
        most_chars: int = MOST_CHARS,
    ) -> None:
        self.template = template
        self._seconds = seconds
        limits = {"seconds": seconds, "bytes": memory_bytes, "chars": most_chars}
        given = {"template": template, "variables": dict(variables), "limits": limits}
        self._given = json.dumps(given, default=str).encode("ascii") + b"\n"
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., ChatTemplate] | None = None  # of that process
        self._lock = threading.Lock()

    def render(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None
    ) -> str:
        """The conversation's text. `variables` go before those of the template. Raises TemplateError."""
        given = {**(variables or {}), "messages": [dict(message) for message in messages]}
        try:
            line = json.dumps(given)
        except (TypeError, ValueError, RecursionError) as error:
            raise TemplateError(f"takes what JSON can say: {error}") from error
        with self._lock:
            answer = json.loads(self._answer(line.encode("ascii") + b"\n"))
        if "error" in answer:
            raise TemplateError(f"refused them: {answer['error']}")
        text: str = answer["text"]
        return text

    def close(self) -> None:
        """End the process. Another conversation starts another."""
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
        if answer is None or code == -signal.SIGPROF:
            raise TemplateError(f"ran for too long: not done within {self._seconds:g} s")
        if code is None:
            return answer
        if is_new:
            raise TemplateError(f"ended its process with exit code {code}")
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
            raise TemplateError(f"cannot be run: {error}") from error
        self._end = weakref.finalize(self, _end, self._process)

    def _ended(self) -> int | None:
        """End the process; its exit code."""
        code: int | None = self._end() if self._end is not None else None
        self._process = self._end = None
        return code

    def _start(self) -> subprocess.Popen[bytes]:
        child = Path(__file__).with_name("template_child.py")
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
        raise Misuse("a template's process has pipes")
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
