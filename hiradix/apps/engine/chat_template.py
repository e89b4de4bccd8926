"""A model's chat template: a program by whoever made the model, run in a process of its own."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from select import select
from typing import Any

logger = logging.getLogger(__name__)

SECONDS = 5.0  # of the processor, for one conversation, which takes a millisecond
MEMORY_BYTES = 1 << 30  # of addresses, in all
MOST_CHARS = 1 << 24  # of one conversation's text
_PATIENCE_S = 60.0  # by the clock: the process ends itself before, unless it is stopped


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
        self._given = json.dumps(given, default=str)
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The conversation's text with the assistant's turn opened. Raises TemplateError."""
        line = json.dumps({"messages": [dict(message) for message in messages]})
        with self._lock:
            answer = json.loads(self._answer(line))
        if "error" in answer:
            raise TemplateError(f"refused them: {answer['error']}")
        text: str = answer["text"]
        return text

    def close(self) -> None:
        """End the process. Another conversation starts another."""
        with self._lock:
            if self._process is not None:
                _end(self._process)
                self._process = None

    def _answer(self, line: str) -> str:
        process = self._process if self._process is not None and self._process.poll() is None else None
        try:
            if process is None:
                process = self._process = self._start()
            stdin, stdout = process.stdin, process.stdout
            assert stdin is not None and stdout is not None
            stdin.write(line + "\n")
            stdin.flush()
            answer = stdout.readline() if select([stdout], [], [], self._seconds + _PATIENCE_S)[0] else ""
        except OSError as error:
            if process is None:
                raise TemplateError(f"cannot be run: {error}") from error
            answer = ""  # it has ended
        if answer.endswith("\n"):
            return answer
        self._process = None
        code = _end(process)
        if code in (-signal.SIGPROF, -signal.SIGKILL):
            raise TemplateError(f"ran for too long: not done within {self._seconds:g} s")
        raise TemplateError(f"ended its process with exit code {code}")

    def _start(self) -> subprocess.Popen[str]:
        child = Path(__file__).with_name("template_child.py")
        process = subprocess.Popen(
            [sys.executable, "-P", str(child)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="ascii",
        )  # fmt: skip
        weakref.finalize(self, _end, process)
        assert process.stdin is not None
        process.stdin.write(self._given + "\n")
        return process


def _end(process: subprocess.Popen[str]) -> int:
    """Its exit code; where it still runs it is killed."""
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            try:
                stream.close()
            except OSError:
                pass  # what it has not read is of no use
    try:
        return process.wait(0.1)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
